"""The script of the pages: it shows the values under the pointer, and opens folded parts before printing.

The page needs it for nothing else: charts, their axes and all numbers are there without a script. The values are read
from the drawn curves, so they are as exact as the drawing, which has 1,000 units from the lowest value to the highest.
"""

from __future__ import annotations

SCRIPT = r"""
(() => {
  "use strict";
  const find = (place, [low, high, isLogarithmic]) =>
    isLogarithmic ? low * (high / low) ** place : low + (high - low) * place;
  const write = (value) => value === 0 ? "0" : Math.abs(value) >= 1e5
    ? new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 4 }).format(value)
    : Math.abs(value) >= 1e-3 ? new Intl.NumberFormat("en", { maximumSignificantDigits: 4 }).format(value)
    : value.toExponential(2);
  const places = new WeakMap();
  const read = (path) => {
    if (!places.has(path)) {
      const numbers = path.getAttribute("d").match(/-?\d+/g).map(Number);
      const points = [[numbers[0], numbers[1]]];
      for (let i = 2; i < numbers.length; i += 2) {
        const [x, y] = points[points.length - 1];
        points.push([x + numbers[i], y + numbers[i + 1]]);
      }
      places.set(path, points);
    }
    return places.get(path);
  };
  const nearest = (points, x) => points.reduce((best, p) => Math.abs(p[0] - x) < Math.abs(best[0] - x) ? p : best);
  const clear = (plot) => plot.querySelectorAll(".pointer, .hint").forEach((each) => each.remove());

  const show = (plot, share) => {
    clear(plot);
    const svg = plot.querySelector("svg"), box = svg.viewBox.baseVal;
    const [xScale, yScale] = [plot.dataset.x, plot.dataset.y].map((text) => text.split(" ").map(Number));
    const lines = [...svg.querySelectorAll(".curve")].map((path) => {
      const point = nearest(read(path), share * box.width);
      return [point[0], `${path.dataset.name}: ${write(find(1 - point[1] / box.height, yScale))}`];
    });
    const at = lines.map((line) => line[0]).reduce((best, x) =>
      Math.abs(x - share * box.width) < Math.abs(best - share * box.width) ? x : best);
    const left = svg.getBoundingClientRect().left - plot.getBoundingClientRect().left;
    const x = left + svg.clientWidth * at / box.width;
    const pointer = document.createElement("div"), hint = document.createElement("div");
    pointer.className = "pointer"; pointer.style.left = `${x}px`; pointer.style.height = `${svg.clientHeight}px`;
    hint.className = "hint";
    hint.append(`${plot.querySelector(".axis").textContent}: ${write(find(at / box.width, xScale))}`);
    lines.slice(0, 8).forEach((line) => hint.append(document.createElement("br"), line[1]));
    plot.append(pointer, hint);
    hint.style.left = `${Math.max(0, Math.min(x + 10, plot.clientWidth - hint.offsetWidth))}px`;
  };

  document.querySelectorAll(".plot").forEach((plot) => {
    const svg = plot.querySelector("svg");
    svg.addEventListener("pointermove", (event) => {
      const box = svg.getBoundingClientRect();
      show(plot, Math.min(1, Math.max(0, (event.clientX - box.left) / box.width)));
    });
    svg.addEventListener("pointerleave", () => clear(plot));
  });
  addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((each) => { each.open = true; }));
})();
"""
