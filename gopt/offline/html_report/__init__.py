"""One self-contained HTML page of an output folder: ``gopt report DIR --html FILE``.

``data`` builds the record of the page, ``page`` fills the template, ``write`` puts the page on disk. The template, its
scripts and the charting library lie in ``page/``, as data of the package."""

from gopt.offline.html_report.data import report_page as report_page
from gopt.offline.html_report.page import page_text as page_text
from gopt.offline.html_report.record import ReportPage as ReportPage
from gopt.offline.html_report.write import write_page as write_page
