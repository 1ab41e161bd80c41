// The step: lanes of compute and calls. Chart.js draws the bars, buttons and keys move along them.
const PHASES = { forward: "c1", backward: "c3", update: "c4", compute: "c1" };
const CALLS = ["c2", "c5", "c6"];

function timelineSection(data) {
  const line = data.timeline, ms = line.unit === "ms";
  const at = (value) => (ms ? `${count(value)} ms` : `operator ${count(value)}`);
  const length = (span) => (ms ? `${(span.end - span.start).toFixed(3)} ms` : plural(span.end - span.start, "operator"));
  const kinds = [...new Set(line.spans.map((each) => each.kind))];
  const calls = kinds.filter((kind) => !(kind in PHASES));
  const colours = Object.fromEntries(kinds.map((kind) => [kind, PHASES[kind] || CALLS[calls.indexOf(kind) % CALLS.length]]));
  const end = Math.max(1, ...line.spans.map((each) => each.end));
  const about = (span) => [
    `${line.lanes[span.lane]}: ${at(span.start)} to ${at(span.end)}, ${length(span)}`,
    ...(span.bytes === undefined ? [] : [`moves ${bytes(span.bytes)}`]),
    ...(span.hidden === undefined ? [] : [span.hidden ? "heavy work to overlap with" : "no heavy work to overlap with"]),
  ];
  const sets = kinds.map((kind) => ({
    label: kind, colour: colours[kind], ...coloured, grouped: false, minBarLength: 2, barPercentage: 0.8, categoryPercentage: 0.9,
    borderWidth: { left: 0, right: 1, top: 0, bottom: 0 }, borderSkipped: false,
    data: line.spans.filter((each) => each.kind === kind).map((each) => ({ x: [each.start, each.end], y: line.lanes[each.lane], span: each })),
  }));
  const drawn = figure(
    `Timeline of a step: ${plural(line.lanes.length, "lane")}, ${plural(line.spans.length, "bar")}. Arrow keys move, plus and minus zoom, Home shows all.`,
    line.lanes.length * 30 + 110,
    {
      type: "bar",
      data: { labels: line.lanes, datasets: sets },
      options: {
        indexAxis: "y", responsive: true, maintainAspectRatio: false,
        scales: {
          x: { type: "linear", min: line.focus[0], max: line.focus[1], ticks: { maxRotation: 0, includeBounds: false, callback: (value) => count(value) }, grid: {}, title: { display: true, text: ms ? "milliseconds" : "operators, in their order" } },
          y: { ticks: { autoSkip: false, callback(value) { return cut(this.getLabelForValue(value), 24); } }, grid: { display: false } },
        },
        plugins: {
          legend: { position: "top", align: "start", labels: { boxWidth: 12, boxHeight: 12 } },
          tooltip: { mode: "nearest", intersect: true, callbacks: { title: (items) => items[0].raw.span.name, label: (item) => about(item.raw.span) } },
        },
      },
    },
    { tabindex: 0 },
  );
  const place = element("span", { role: "status" });
  function show(from, to) {
    const width = Math.min(Math.max(to - from, end / 5000), end), start = Math.min(Math.max(from, 0), end - width);
    Object.assign(drawn.chart.options.scales.x, { min: start, max: start + width });
    drawn.chart.update("none");
    place.textContent = `${at(start)} to ${at(start + width)}`;
  }
  const now = () => drawn.chart.options.scales.x;
  const zoom = (factor) => { const middle = (now().min + now().max) / 2, half = ((now().max - now().min) / 2) * factor; show(middle - half, middle + half); };
  const move = (share) => { const step = (now().max - now().min) * share; show(now().min + step, now().max + step); };
  const keys = { "+": () => zoom(0.5), "=": () => zoom(0.5), "-": () => zoom(2), ArrowLeft: () => move(-0.25), ArrowRight: () => move(0.25), Home: () => show(0, end) };
  drawn.querySelector("canvas").addEventListener("keydown", (event) => {
    if (!event.ctrlKey && !event.metaKey && !event.altKey && keys[event.key]) { event.preventDefault(); keys[event.key](); }
  });
  const button = (text, act) => element("button", { type: "button", onclick: act }, text);
  const partial = line.focus[0] > 0 || line.focus[1] < end;
  const controls = element("div", { class: "controls", role: "group", "aria-label": "Part of the timeline" },
    button("Zoom in", keys["+"]), button("Zoom out", keys["-"]), button("Earlier", keys.ArrowLeft), button("Later", keys.ArrowRight), button("All", keys.Home),
    partial ? button("Last step", () => show(...line.focus)) : null, place);
  const columns = [
    { label: "lane", value: (row) => line.lanes[row.lane], sort: (row) => row.lane },
    { label: "kind", value: (row) => row.kind, sort: (row) => row.kind },
    { label: "name", value: (row) => named(row.name), sort: (row) => row.name },
    { label: ms ? "begins, ms" : "begins at", number: true, value: (row) => count(row.start), sort: (row) => row.start },
    { label: ms ? "takes, ms" : "operators", number: true, value: (row) => (ms ? (row.end - row.start).toFixed(3) : count(row.end - row.start)), sort: (row) => row.end - row.start },
    { label: "moves", number: true, value: (row) => bytes(row.bytes), sort: (row) => row.bytes || 0 },
    { label: "overlaps", value: (row) => (row.hidden === undefined ? "" : row.hidden ? "yes" : "no") },
  ];
  const left = line.dropped ? ` ${plural(line.dropped, "bar")} more ${line.dropped === 1 ? "is" : "are"} left out.` : "";
  const made = section("timeline", "Timeline of a step",
    element("p", { class: "hint" }, `${ms ? "A trace, " : "From the plan: "}${line.note}${left}`), controls, drawn,
    asTable("The timeline as a table", () => pagedTable("Bars of the timeline", columns, line.spans, { word: "bar" })));
  made.start = () => { drawn.start(); show(...line.focus); };
  return made;
}
