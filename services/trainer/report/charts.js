// Draws the charts of the element `millrace-charts` with uPlot, in the colours of page.css.
(() => {
  "use strict";
  const data = JSON.parse(document.getElementById("millrace-charts").textContent);

  const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const chosen = (group) => document.querySelector(`.choice [name=${group}]:checked`).value;
  const curveColor = (curve) => color(`--c${curve.color % 8}`);

  const compact = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 });
  const number = (value, step) => {
    if (value === 0) return "0";
    if (Math.abs(value) >= 1e4) return compact.format(value).replace("K", "k");
    if (Math.abs(value) < 1e-3) return value.toExponential(step ? 0 : 2).replace(/\.?0*e/, "e");
    const digits = step ? { minimumFractionDigits: Math.max(0, -Math.floor(Math.log10(step))) }
      : { maximumSignificantDigits: 4 };
    return new Intl.NumberFormat("en", digits).format(value);
  };
  const bytes = (value) => {
    const units = ["B", "kB", "MB", "GB", "TB"];
    const power = units.findLastIndex((_, each) => each === 0 || value >= 1e3 ** each);
    return `${+(value / 1e3 ** power).toPrecision(3)} ${units[power]}`;
  };
  const fromZero = new Set(["share", "seconds", "bytes", "tokens per second", "root mean square"]);
  const logarithmic = new Set(["nats per token", "bits per byte", "L2 norm", "ratio", "seconds", "no unit"]);
  const formats = { share: (value) => `${+(100 * value).toPrecision(3)}%`, bytes };

  // The horizontal axis. Tokens and seconds of a step are interpolated between the positions of its run.
  const position = (run, step, field) => {
    const { steps, [field]: values } = data.runs[run];
    if (!steps.length) return 0;
    let right = steps.findIndex((each) => each >= step);
    if (right < 0) right = steps.length - 1;
    if (right === 0 || steps[right] <= step) return values[right];
    const share = (step - steps[right - 1]) / (steps[right] - steps[right - 1]);
    return values[right - 1] + share * (values[right] - values[right - 1]);
  };
  const longest = Math.max(...data.runs.map((run) => run.seconds.at(-1) ?? 0));
  const [timeUnit, unitSeconds] = [["days", 86400, 2 * 86400], ["hours", 3600, 2 * 3600], ["minutes", 60, 120]]
    .find(([, , least]) => longest >= least) ?? ["seconds", 1];
  const axes = {
    step: ["step", (run, step) => step],
    log: ["step, logarithmic", (run, step) => Math.max(1, step)],
    tokens: ["tokens trained on", (run, step) => position(run, step, "tokens")],
    time: [`${timeUnit} since the run began`, (run, step) => position(run, step, "seconds") / unitSeconds],
  };

  // Colour, length as a share of the height, and dashes of a mark.
  const marks = {
    checkpoint: ["--good", 0.04, []],
    skipped: ["--bad", 0.07, []],
    straggler: ["--c3", 1, [2, 5]],
    restart: ["--warn", 1, [4, 4]],
    rollback: ["--bad", 1, [8, 4]],
  };

  const line = (plot, stroke, width, dash, points) => {
    const { ctx, bbox } = plot;
    ctx.save();
    ctx.beginPath();
    ctx.rect(bbox.left - 2, bbox.top, bbox.width + 4, bbox.height);
    ctx.clip();
    ctx.beginPath();
    Object.assign(ctx, { strokeStyle: stroke, lineWidth: width * devicePixelRatio });
    ctx.setLineDash(dash.map((length) => length * devicePixelRatio));
    for (const [fromX, fromY, toX, toY] of points) { ctx.moveTo(fromX, fromY); ctx.lineTo(toX, toY); }
    ctx.stroke();
    ctx.restore();
  };

  const drawMarks = (plot, kinds, place) => {
    const { top, height } = plot.bbox;
    for (const kind of kinds) {
      const [name, share, dash] = marks[kind];
      line(plot, color(name), share < 1 ? 2 : 1, dash, (data.marks[kind] ?? []).map((step) => {
        const x = plot.valToPos(place(0, step), "x", true);
        return [x, top + height, x, top + height * (1 - share)];
      }));
    }
  };

  const drawErrors = (plot, curve, places) => line(plot, curveColor(curve), 1.5, [], places.map((place, i) => {
    const [x, low, high] = [place, curve.values[i] - curve.errors[i], curve.values[i] + curve.errors[i]]
      .map((value, j) => plot.valToPos(value, j ? "y" : "x", true));
    return [x, low, x, high];
  }));

  const drawReference = (plot, value) => {
    const { left, width } = plot.bbox, y = plot.valToPos(value, "y", true);
    line(plot, color("--mark"), 1.5, [6, 4], [[left, y, left + width, y]]);
  };

  // Rounds to one significant digit, at which a logarithmic axis has its ticks.
  const toDigit = (value, round) => {
    const power = 10 ** Math.floor(Math.log10(value));
    return round(value / power) * power;
  };

  const fitValues = (unit, reference, isLogarithmic) => (plot, min, max) => {
    if (min === null) return [min, max];
    if (reference && reference[1] <= 2 * max) [min, max] = [Math.min(min, reference[1]), Math.max(max, reference[1])];
    if (isLogarithmic) {
      const [low, high] = [toDigit(min, Math.floor), toDigit(max, Math.ceil)];
      return low < high ? [low, high] : [low / 2, high * 2];
    }
    if (fromZero.has(unit)) min = Math.min(0, min);
    const margin = (max - min) / 20 || Math.abs(max) / 10 || 1;
    return [fromZero.has(unit) && min === 0 ? 0 : min - margin, max + margin];
  };

  // Values in the legend: those of the step below the pointer, or else the last ones.
  const fillLegend = (figure, { curves, reference }, write) => {
    const legend = figure.querySelector(".legend");
    const add = (classes, shape, name, value) => {
      const item = document.createElement("li"), icon = document.createElement("i"), bold = document.createElement("b");
      item.className = classes;
      icon.className = shape;
      bold.textContent = write(value);
      item.append(icon, `${name} `, bold);
      legend.append(item);
      return bold;
    };
    legend.replaceChildren();
    const values = curves.map((curve) => curve.is_faint ? null
      : add(`c${curve.color % 8}`, curve.has_dots ? "dot" : "line", curve.name, curve.values.at(-1)));
    if (reference) add("reference", "line", ...reference);
    return values;
  };

  const draw = ([id, { curves, reference }]) => {
    const figure = document.getElementById(id), frame = figure.querySelector(".plot"), { unit } = figure.dataset;
    const [label, place] = axes[chosen("x")];
    const isLogarithmic = logarithmic.has(unit) && chosen("y") === "logarithmic";
    const write = formats[unit] ?? number;
    const places = curves.map((curve) => curve.steps.map((step) => place(curve.run, step)));
    const runs = [...new Set(curves.map((curve) => curve.run))].filter((run) => data.runs[run].steps.length);
    const ends = runs.flatMap((run) => [0, -1].map((end) => place(run, data.runs[run].steps.at(end))));
    const tables = curves.map((curve, i) => [places[i],
      isLogarithmic ? curve.values.map((value) => value > 0 ? value : null) : curve.values]);
    tables.push([[...new Set(ends)].sort((a, b) => a - b), new Set(ends).size === 1 ? [null] : [null, null]]);
    const legend = fillLegend(figure, { curves, reference }, write);

    const axis = { stroke: () => color("--quiet"), font: "12px system-ui, sans-serif", ticks: { show: false } };
    const options = {
      width: frame.clientWidth,
      height: frame.clientHeight,
      padding: [8, 18, 0, 0],
      legend: { show: false },
      cursor: { y: false, drag: { x: true, y: false } },
      scales: {
        x: {
          time: false,
          distr: chosen("x") === "log" ? 3 : 1,
          range: (plot, min, max) => [min, max > min ? max : min + 1],
        },
        y: { distr: isLogarithmic ? 3 : 1, range: fitValues(unit, reference, isLogarithmic) },
      },
      axes: [
        { ...axis, label, labelFont: axis.font, labelSize: 18, size: 26, space: 90, grid: { show: false },
          values: (plot, splits) => splits.map((value) => value === null ? null : number(value)) },
        { ...axis, size: 54, space: 36, grid: { stroke: () => color("--grid"), width: 1 },
          values: (plot, splits, i, space, step) =>
            splits.map((value) => value === null ? null : write(value, isLogarithmic ? undefined : step)) },
      ],
      series: [{}, ...curves.map((curve) => ({
        stroke: () => curveColor(curve),
        width: curve.is_faint ? 1 : 2,
        alpha: curve.is_faint ? 0.38 : 1,
        spanGaps: true,
        pxAlign: 0,
        points: { show: curve.has_dots, size: 7, width: 0, fill: () => curveColor(curve) },
      })), { show: false }],
      hooks: {
        drawAxes: [(plot) => drawMarks(plot, figure.dataset.marks.split(" "), place)],
        draw: [(plot) => {
          curves.forEach((curve, i) => { if (curve.errors) drawErrors(plot, curve, places[i]); });
          if (reference) drawReference(plot, reference[1]);
        }],
        setCursor: [(plot) => {
          const { idx, left } = plot.cursor, x = idx === null || left < 0 ? null : plot.data[0][idx];
          curves.forEach((curve, i) => {
            if (!legend[i]) return;
            const at = x === null ? places[i].length - 1 : places[i].reduce(
              (best, each, j) => Math.abs(each - x) < Math.abs(places[i][best] - x) ? j : best, 0);
            legend[i].textContent = write(curve.values[at]) + (x === null ? "" : ` at ${number(places[i][at])}`);
          });
        }],
      },
    };
    frame.replaceChildren();
    return new uPlot(options, uPlot.join(tables), frame);
  };

  let plots = [];
  const drawAll = () => {
    plots.forEach((plot) => plot.destroy());
    plots = Object.entries(data.charts).map(draw);
  };
  drawAll();
  document.querySelector(".choice").addEventListener("change", drawAll);
  addEventListener("resize", () => plots.forEach((plot) => {
    const { clientWidth: width, clientHeight: height } = plot.root.parentElement;
    plot.setSize({ width, height });
  }));
  addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((each) => { each.open = true; }));
  for (const query of ["(prefers-color-scheme: dark)", "print"])
    matchMedia(query).addEventListener("change", () => plots.forEach((plot) => plot.redraw(false)));
})();
