"use strict";
// Draws the charts of `data` (page.py) in the colors of the page, and again when those change.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  // Told apart by color-blind readers, on white and on black.
  const COLORS = ["#2f7ed8", "#e07b00", "#12936a", "#c4569b", "#b59a00", "#7a6ad8", "#c8452f", "#4f9fb5"];
  const DASHES = ["solid", "dash", "dot", "dashdot"];
  const FEW = 40;

  const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  function trace(one) {
    const few = one.x.length <= FEW;
    const several = data.runs.length > 1;
    return {
      x: one.x, y: one.y, type: "scatter", mode: few ? "lines+markers" : "lines",
      name: several ? `${data.runs[one.run]} ${one.metric}` : one.metric, legendgroup: one.metric,
      showlegend: false,
      line: { color: COLORS[(several ? one.run : one.rank) % COLORS.length], width: 1.6, dash: DASHES[one.rank % DASHES.length] },
      marker: { size: 5 },
      hovertemplate: "%{y:.5~g} at %{x:,} tokens",
    };
  }

  // Marks at the foot of the chart: more than a line each would hide the curves.
  function marks(run) {
    const shown = data.events[run].filter(([, kind]) => kind !== "save");
    return shown.length === 0 ? [] : [{
      x: shown.map(([tokens]) => tokens), y: shown.map(() => 0.02), yaxis: "y2", type: "scatter", mode: "markers",
      showlegend: false,
      marker: { symbol: "triangle-up", size: 10, color: COLORS[run % COLORS.length] },
      text: shown.map(([, kind, text]) => `${kind}: ${text}`), hovertemplate: "%{text}<extra></extra>",
    }];
  }

  // Colors are named once, above all charts. A chart of several metrics says which dashes are which.
  function dashes(chart) {
    const metrics = [...new Map(chart.traces.map((one) => [one.rank, one.metric]))];
    return metrics.length < 2 ? [] : metrics.map(([rank, metric]) => ({
      x: [null], y: [null], type: "scatter", mode: "lines", name: metric, legendgroup: metric,
      line: {
        color: data.runs.length > 1 ? color("--faint") : COLORS[rank % COLORS.length], width: 1.6,
        dash: DASHES[rank % DASHES.length],
      },
    }));
  }

  function layout(chart) {
    const axis = { gridcolor: color("--line"), zeroline: false, linecolor: color("--line"), automargin: true };
    return {
      title: { text: chart.title, font: { size: 14 }, x: 0.02, xanchor: "left" },
      paper_bgcolor: color("--page"), plot_bgcolor: color("--page"), font: { color: color("--text"), size: 12 },
      margin: { l: 48, r: 12, t: 40, b: 36 }, hovermode: "closest", showlegend: true,
      legend: { orientation: "h", y: -0.18, yanchor: "top", font: { size: 11 } },
      xaxis: { ...axis, tickformat: "~s", rangemode: "tozero" },
      yaxis: {
        ...axis, type: chart.log ? "log" : "linear", tickformat: chart.log ? "~g" : "",
        rangemode: chart.fromZero ? "tozero" : "normal",
      },
      yaxis2: { overlaying: "y", range: [0, 1], visible: false, fixedrange: true },
    };
  }

  function draw(chart, element) {
    const traces = [...chart.traces.map(trace), ...dashes(chart)];
    if (chart.first) data.runs.forEach((_, run) => traces.push(...marks(run)));
    const file = chart.title.replace(/[^a-z0-9]+/gi, "-").toLowerCase();
    return Plotly.react(element, traces, layout(chart), {
      responsive: true, displaylogo: false, modeBarButtons: [["toImage", "resetScale2d"]],
      toImageButtonOptions: { format: "png", filename: file, scale: 2 },
    });
  }

  const drawn = [];
  function add(charts, parent) {
    const elements = charts.map(() => Object.assign(document.createElement("div"), { className: "chart" }));
    parent.append(...elements); // all of them before any is drawn: it takes the width that it finds
    charts.forEach((chart, i) => {
      drawn.push([chart, elements[i]]);
      draw(chart, elements[i]);
    });
  }

  document.querySelectorAll("#legend li").forEach((item, run) => {
    item.style.setProperty("--run", COLORS[run % COLORS.length]);
  });
  const others = data.charts.filter((chart) => !chart.first);
  const more = document.getElementById("more");
  more.querySelector("summary").textContent = others.length;
  add(data.charts.filter((chart) => chart.first), document.getElementById("first"));
  // Drawn when looked at: they may be hundreds.
  more.addEventListener("toggle", () => {
    const parent = document.getElementById("others");
    if (more.open && parent.childElementCount === 0) add(others, parent);
  });
  dark.addEventListener("change", () => drawn.forEach(([chart, element]) => draw(chart, element)));
})();
