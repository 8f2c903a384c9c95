"use strict";
// Draws the charts of `data` (page.py) in the colors of the page, and again when those or the smoothing change.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const slider = document.querySelector("#smooth input");
  // Told apart by color-blind readers, on white and on black.
  const COLORS = ["#2f7ed8", "#e07b00", "#12936a", "#c4569b", "#b59a00", "#7a6ad8", "#c8452f", "#4f9fb5"];
  const DASHES = ["solid", "dash", "dot", "dashdot"];
  const FEW = 40;

  // Plotly takes tags and entities in a text for what they stand for.
  const plain = (text) => text.replaceAll("&", "&amp;").replaceAll("<", "&lt;");
  const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  // An exponential mean that begins with the first value. A share `kept` of it is what came before.
  function smoothed(values, kept) {
    let mean = 0, weight = 0;
    return values.map((value) => {
      mean = kept * mean + (1 - kept) * value;
      weight = kept * weight + (1 - kept);
      return Number((mean / weight).toPrecision(6)); // a constant stays one
    });
  }

  // The values, and where they are many a smooth line of them.
  function traces(one, exact) {
    const [x, y] = one.curve;
    const several = data.runs.length > 1;
    const kept = Number(slider.value);
    const smooth = !exact && kept > 0 && x.length > FEW;
    const line = {
      x, y, type: "scatter", mode: x.length <= FEW ? "lines+markers" : "lines",
      name: plain(several ? `${data.runs[one.run]} ${one.metric}` : one.metric), legendgroup: one.metric,
      showlegend: false,
      line: { color: COLORS[(several ? one.run : one.rank) % COLORS.length], width: 1.6, dash: DASHES[one.rank % DASHES.length] },
      marker: { size: 5 },
      hovertemplate: "%{y:.5~g} at %{x:,} tokens",
    };
    if (!smooth) return [line];
    const [means_x, means_y] = one.means || one.curve;
    return [
      { ...line, opacity: 0.25, hoverinfo: "skip", hovertemplate: null, line: { ...line.line, width: 1 } },
      { ...line, x: means_x, y: smoothed(means_y, kept), hovertemplate: "%{y:.5~g}, smoothed, at %{x:,} tokens" },
    ];
  }

  // Marks at the foot of the chart: more than a line each would hide the curves.
  function marks(run) {
    const shown = data.events[run].filter(([, kind]) => kind !== "save");
    return shown.length === 0 ? [] : [{
      x: shown.map(([tokens]) => tokens), y: shown.map(() => 0.02), yaxis: "y2", type: "scatter", mode: "markers",
      showlegend: false,
      marker: { symbol: "triangle-up", size: 10, color: COLORS[run % COLORS.length] },
      text: shown.map(([, kind, text]) => plain(`${kind}: ${text}`)), hovertemplate: "%{text}<extra></extra>",
    }];
  }

  // Colors are named once, above all charts. A chart of several metrics says which dashes are which.
  function dashes(chart) {
    const metrics = [...new Map(chart.traces.map((one) => [one.rank, one]))];
    return metrics.length < 2 ? [] : metrics.map(([rank, { metric, meaning }]) => ({
      x: [null], y: [null], type: "scatter", mode: "lines", legendgroup: metric,
      name: plain(meaning ? `${metric}: ${meaning}` : metric),
      line: {
        color: data.runs.length > 1 ? color("--faint") : COLORS[rank % COLORS.length], width: 1.6,
        dash: DASHES[rank % DASHES.length],
      },
    }));
  }

  // In lines that end before the buttons above the chart.
  function wrapped(title, width) {
    const most = (width - 90) / 7.5;
    return title.split(" ").reduce((lines, word) => {
      const line = lines.at(-1);
      return line && line.length + 1 + word.length > most ? [...lines, word] : [...lines.slice(0, -1), line ? `${line} ${word}` : word];
    }, [""]);
  }

  function layout(chart, width) {
    const axis = { gridcolor: color("--line"), zeroline: false, linecolor: color("--line"), automargin: true };
    const named = (text) => ({ text: plain(text), font: { size: 11, color: color("--faint") }, standoff: 6 });
    const title = wrapped(chart.title, width).map(plain);
    const largest = Math.max(...chart.traces.flatMap((one) => one.curve[1]));
    return {
      title: { text: title.join("<br>"), font: { size: 14 }, x: 0.02, xanchor: "left", y: 0.97, yanchor: "top" },
      paper_bgcolor: color("--page"), plot_bgcolor: color("--page"), font: { color: color("--text"), size: 12 },
      margin: { l: 48, r: 16, t: 22 + 18 * title.length, b: 36 }, hovermode: "closest", showlegend: true,
      legend: { orientation: "h", y: -0.26, yanchor: "top", font: { size: 11 } },
      xaxis: { ...axis, title: named("tokens seen"), tickformat: "~s", rangemode: "tozero", nticks: 7 },
      yaxis: {
        ...axis, title: named(chart.unit), type: chart.log ? "log" : "linear", tickformat: chart.log ? "~g" : "",
        exponentformat: largest < 0.01 ? "e" : "B",
        rangemode: chart.fromZero ? "tozero" : "normal",
        nticks: chart.log ? 3 : 6, // of a decade plotly names all nine digits if it may
      },
      yaxis2: { overlaying: "y", range: [0, 1], visible: false, fixedrange: true },
    };
  }

  // Loads of experts: the mean is gray, twice the mean and more is the darkest.
  function drawHeat(chart, element) {
    const { experts, layers, loads } = chart.heat;
    const map = {
      type: "heatmap", x: experts, y: layers, z: loads, zmin: 0, zmax: 2, xgap: 1, ygap: 1,
      colorscale: [[0, COLORS[0]], [0.5, color("--line")], [1, COLORS[6]]], colorbar: { thickness: 10, tickvals: [0, 1, 2] },
      hovertemplate: "expert %{x} of layer %{y}: %{z:.3~g} times the mean<extra></extra>",
    };
    const { xaxis, yaxis, yaxis2, ...rest } = layout({ ...chart, traces: [] }, element.clientWidth);
    const axis = { type: "category", nticks: 8, showgrid: false };
    const titled = { ...xaxis.title, text: "expert" };
    const axes = { xaxis: { ...xaxis, ...axis, title: titled }, yaxis: { ...yaxis, ...axis } };
    return Plotly.react(element, [map], { ...rest, ...axes }, buttons(chart));
  }

  const buttons = (chart) => ({
    responsive: true, displaylogo: false, modeBarButtons: [["toImage", "resetScale2d"]],
    toImageButtonOptions: { format: "png", filename: chart.title.replace(/[^a-z0-9]+/gi, "-").toLowerCase(), scale: 2 },
  });

  function draw(chart, element) {
    if (chart.heat) return drawHeat(chart, element);
    const lines = [...chart.traces.flatMap((one) => traces(one, chart.exact)), ...dashes(chart)];
    if (chart.first) data.runs.forEach((_, run) => lines.push(...marks(run)));
    return Plotly.react(element, lines, layout(chart, element.clientWidth), buttons(chart));
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
  const drawAgain = () => drawn.forEach(([chart, element]) => draw(chart, element));

  const smoothing = document.querySelector("#smooth output");
  smoothing.textContent = slider.value;
  slider.addEventListener("input", () => { smoothing.textContent = slider.value; });
  slider.addEventListener("change", drawAgain);
  document.querySelectorAll("#legend li:not(.event)").forEach((item, run) => {
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
  dark.addEventListener("change", drawAgain);
})();
