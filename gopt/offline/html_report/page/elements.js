// Elements from data. Text goes through text nodes alone: a name cannot become markup.
function element(tag, attributes, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) made.setAttribute(name, value === true ? "" : value);
  }
  for (const child of children.flat()) if (child !== null && child !== undefined) made.append(child);
  return made;
}
const named = (text) => element("span", { class: "name" }, text);
let lastId = 0;
const newId = (prefix) => `${prefix}-${(lastId += 1)}`;

function section(id, title, ...children) {
  const heading = element("h2", { id: `${id}-title` }, title);
  return element("section", { id, "aria-labelledby": `${id}-title` }, heading, ...children);
}

// A column: {label, value: row => text or node, number, sort: row => key}.
function plainTable(caption, columns, rows, options = {}) {
  const head = element("tr", null, columns.map((each) => element("th", { scope: "col", class: each.number && "number" }, each.label)));
  const body = rows.map((row) => element("tr", null, cells(columns, row)));
  const table = element("table", { class: options.class }, element("caption", null, caption), element("thead", null, head), element("tbody", null, body));
  return element("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": caption }, table);
}
function cells(columns, row) {
  return columns.map((each, index) => {
    const tag = each.heading && index === 0 ? "th" : "td";
    return element(tag, { class: each.number && "number", scope: tag === "th" && "row" }, each.value(row));
  });
}

// A table of many rows: pages, sorted by a header. `update(rows)` shows others.
function pagedTable(caption, columns, rows, options = {}) {
  const size = options.size || 50;
  const state = { rows, shown: rows, page: 0, by: null, down: false };
  const body = element("tbody");
  const status = element("span", { role: "status" });
  const previous = element("button", { type: "button", onclick: () => turn(-1) }, "Previous page");
  const next = element("button", { type: "button", onclick: () => turn(1) }, "Next page");
  const heads = columns.map((each) => {
    const head = element("th", { scope: "col", class: each.number && "number" });
    head.append(each.sort ? element("button", { type: "button", onclick: () => order(each, head) }, each.label, element("span", { "aria-hidden": "true" })) : each.label);
    return head;
  });
  function order(column, head) {
    state.down = state.by === column ? !state.down : false;
    state.by = column;
    heads.forEach((each) => { each.removeAttribute("aria-sort"); const mark = each.querySelector("span"); if (mark) mark.textContent = ""; });
    head.setAttribute("aria-sort", state.down ? "descending" : "ascending");
    head.querySelector("span").textContent = state.down ? " ↓" : " ↑";
    sort();
    show();
  }
  function sort() {
    if (!state.by) { state.shown = state.rows; return; }
    const sign = state.down ? -1 : 1, key = state.by.sort;
    state.shown = [...state.rows].sort((one, other) => {
      const a = key(one), b = key(other);
      return sign * (a < b ? -1 : a > b ? 1 : 0);
    });
    state.page = 0;
  }
  function turn(step) { state.page += step; show(); }
  function show() {
    const total = state.shown.length, from = state.page * size, to = Math.min(from + size, total);
    body.replaceChildren(...state.shown.slice(from, to).map((row) => element("tr", null, cells(columns, row))));
    status.textContent = total ? `${count(from + 1)} to ${count(to)} of ${plural(total, options.word || "row")}` : `no ${options.word || "row"}s`;
    previous.disabled = state.page === 0;
    next.disabled = to >= total;
    pager.hidden = total <= size && !options.always;
  }
  const pager = element("div", { class: "pager" }, previous, next, status);
  const table = element("table", { class: `wide ${options.class || ""}` }, element("caption", null, caption), element("thead", null, element("tr", null, heads)), body);
  const whole = element("div", null, element("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": caption }, table), pager);
  whole.update = (others) => { state.rows = others; state.page = 0; sort(); show(); };
  show();
  return whole;
}

// The same as a table, closed until it is asked for: it is made when it is opened.
function asTable(label, make) {
  const details = element("details", null, element("summary", null, label));
  details.addEventListener("toggle", () => { if (details.open && details.children.length === 1) details.append(make()); });
  return details;
}
