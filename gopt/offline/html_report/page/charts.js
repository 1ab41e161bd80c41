// Bars by Chart.js. Every chart has a description for screen readers, and a table beside it.
Chart.defaults.animation = false;
Chart.defaults.font.family = "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif";
Chart.defaults.font.size = 13;
Chart.defaults.plugins.colors.enabled = false;

// Colours are asked for at each update: Chart.js keeps those that it was given.
const coloured = { backgroundColor: (item) => item.dataset.palette?.fill, borderColor: (item) => item.dataset.palette?.edge };

function figure(label, height, config, attributes = {}) {
  const canvas = element("canvas", { role: "img", "aria-label": label, ...attributes });
  const box = element("div", { class: "chart" }, canvas);
  box.style.height = `${height}px`;
  const made = element("figure", null, box);
  made.start = () => {
    made.chart = new Chart(canvas, config);
    paint(made.chart);
    themed.push(() => { paint(made.chart); made.chart.update("none"); });
    made.chart.update("none");
  };
  return made;
}

function paint(chart) {
  for (const set of chart.data.datasets) set.palette = { fill: colour(set.colour), edge: colour("back") };
  for (const scale of Object.values(chart.options.scales)) {
    scale.ticks.color = colour("text");
    scale.grid.color = colour("line");
    scale.border = { color: colour("line") };
    if (scale.title) scale.title.color = colour("dim");
  }
  chart.options.plugins.legend.labels.color = colour("text");
}

const cut = (text, most) => (text.length > most ? `${text.slice(0, most - 1)}…` : text);

// Steps of the axis that are round numbers of bytes.
function byteStep(most) {
  let step = 1;
  while (most / step > 6) step *= 2;
  return step;
}

function stackedBars(label, names, sets, unit) {
  const totals = names.map((_, index) => sets.reduce((sum, set) => sum + set.data[index], 0));
  const ticks = { callback: (value) => amount(value, unit), maxRotation: 0 };
  if (unit === "bytes") ticks.stepSize = byteStep(Math.max(1, ...totals));
  const made = figure(label, names.length * 26 + 86, {
    type: "bar",
    data: {
      labels: names,
      datasets: sets.map((set) => ({ label: set.label, data: set.data, colour: set.colour, ...coloured, barPercentage: 0.85, categoryPercentage: 0.9, maxBarThickness: 30 })),
    },
    options: {
      indexAxis: "y", responsive: true, maintainAspectRatio: false,
      scales: {
        x: { stacked: true, beginAtZero: true, ticks, grid: {} },
        y: { stacked: true, ticks: { autoSkip: false, callback(value) { return cut(this.getLabelForValue(value), 34); } }, grid: { display: false } },
      },
      plugins: {
        legend: { position: "top", align: "start", labels: { boxWidth: 12, boxHeight: 12 } },
        tooltip: {
          mode: "index", axis: "y", intersect: false,
          callbacks: {
            label: (item) => `${item.dataset.label}: ${amount(item.raw, unit)}`,
            footer: (items) => `together: ${amount(items.reduce((sum, each) => sum + each.raw, 0), unit)}`,
          },
        },
      },
    },
  });
  made.scaleTo = (most) => {
    if (unit === "bytes") made.chart.options.scales.x.ticks.stepSize = byteStep(Math.max(1, most));
    made.chart.update("none");
  };
  return made;
}
