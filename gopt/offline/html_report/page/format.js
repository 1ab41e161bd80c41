// Numbers as people read them: as gopt's own tables show them.
const tenth = (value) => { // halves to even, as Python does
  const whole = Math.floor(value * 10);
  return value * 10 - whole === 0.5 && whole % 2 === 0 ? (whole / 10).toFixed(1) : value.toFixed(1);
};
const bytes = (value) => {
  if (value === null || value === undefined) return "";
  let unit = 0;
  while (Math.abs(value) >= 1024 && unit < 4) { value /= 1024; unit += 1; }
  return `${unit ? tenth(value) : Math.round(value)} ${["B", "KiB", "MiB", "GiB", "TiB"][unit]}`;
};
const count = (value) => (value === null || value === undefined ? "" : Number(value.toFixed(2)).toLocaleString("en"));
const plural = (number, word) => `${count(number)} ${word}${number === 1 ? "" : "s"}`;
const amount = (value, unit) => (unit === "bytes" ? bytes(value) : count(value));
const percent = (share) => {
  const whole = Math.abs(share) * 100, digits = whole && (whole < 10 || (whole > 99 && whole < 100)) ? (whole < 99.95 ? 1 : 3) : 0;
  return `${(100 * share).toFixed(digits)}%`;
};
const saving = (before, after) => {
  if (!before || after === null || after === undefined) return "";
  const share = 1 - after / before;
  return share >= 0 ? percent(share) : `${percent(-share)} more`;
};
const shape = (dims) => (dims === null ? "unknown shape" : `[${dims.map((each) => each ?? "?").join(", ")}]`);
const KINDS = [["parameters", "parameters"], ["optimizer_states", "optimizer states"], ["gradients", "gradients"]];
const kindName = (kind) => kind.replace(/_/g, " ");
const heldBy = (held) => KINDS.reduce((sum, [key]) => sum + held[key], 0);
