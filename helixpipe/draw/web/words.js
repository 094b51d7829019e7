"use strict";
// Words, numbers and colours. What stands here and in simulate.js needs no browser.

const OF_WEIGHTS = 4;  // messages of this kind and the next come from no op
const OPS = "op", MESSAGE = "message", SHARING = "sharing", COPY = "copy";

function timeText(value, unit) {
  if (unit !== "s") return +value.toPrecision(6) + (unit ? " " + unit : "");
  const size = Math.abs(value);
  if (size === 0) return "0 s";
  if (size >= 1) return +value.toPrecision(5) + " s";
  return size >= 1e-3 ? +(value * 1e3).toPrecision(4) + " ms" : +(value * 1e6).toPrecision(4) + " µs";
}

function memoryText(value, unit) {
  if (unit !== "bytes") return +value.toPrecision(4) + (unit === "microbatch-layers" ? "" : " " + unit);
  for (const [size, name] of [[2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]])
    if (Math.abs(value) >= size) return +(value / size).toPrecision(4) + " " + name;
  return +value.toPrecision(4) + " B";
}

const percent = share => (100 * share).toFixed(1) + " %";
const signed = share => (share < 0 ? "−" : "+") + (100 * Math.abs(share)).toFixed(1) + " %";
const count = (number, one, many) => number + " " + (number === 1 ? one : many ?? one + "s");

function cellOf(panel, op) {  // 2F5, or 2F5.1 for a chunk
  const {ops} = panel, chunk = ops.chunk[op];
  return ops.stage[op] + ops.kind[op] + ops.microbatch[op] + (chunk ? "." + chunk : "");
}

function nameOf(panel, task) {  // of any task, for people
  const what = panel.whatIs(task);
  if (what.type === OPS) return cellOf(panel, task);
  if (what.type === MESSAGE) {
    const name = page.data.links[what.kind].name;
    const between = `rank ${what.source} to rank ${what.target}`;
    return what.kind < OF_WEIGHTS ? `${name} of ${cellOf(panel, what.producer)} for ${cellOf(panel, what.consumer)} (${between})`
      : `${name} of stage ${panel.ops.stage[what.producer]} (${between})`;
  }
  if (what.type === COPY) {
    const cell = cellOf(panel, what.op);
    return what.inward ? `copy back for ${cell} (rank ${what.rank})` : `copy to the host after ${cell} (rank ${what.rank})`;
  }
  if (what.op < 0) return `sum of gradients over ranks ${what.ranks.join(", ")}`;
  const name = page.data.sharing[what.kind].name;
  return `${name} ${what.kind ? "after" : "for"} ${cellOf(panel, what.op)} (rank ${what.rank})`;
}

// ---------------------------------------------------------------------------------------------------------- colours

const channels = colour => [1, 3, 5].map(i => parseInt(colour.slice(i, i + 2), 16));
const rgb = values => "rgb(" + values.map(Math.round).join(",") + ")";
const mix = (colour, other, part) => rgb(channels(colour).map((c, i) => c + (channels(other)[i] - c) * part));

function shade(colour, index, of) {  // a rank's later stages are paler, as in the PNG
  return mix(colour, "#ffffff", of > 1 ? 0.5 * index / (of - 1) : 0);
}

function inkOn(colour) {
  const linear = colour.match(/\d+/g).map(c => c / 255).map(c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
  return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2] > 0.3 ? "#111" : "#fff";
}

function differenceColour(ratio, limit) {  // shorter is blue, longer is orange, fully at the limit
  if (!isFinite(ratio)) return {fill: "rgb(150,150,150)", ink: "#111"};
  const far = Math.max(-1, Math.min(1, Math.log(ratio) / Math.log(limit)));
  const fill = mix("#d6d6d6", far < 0 ? "#2166ac" : "#b35806", Math.abs(far));
  return {fill, ink: inkOn(fill)};
}
