// Every operator and value that was removed or added: one by one, to be searched and filtered.
const WHAT = ["removed operator", "added operator", "removed value", "added value"];

const perName = (column, number, fallback) => (!column || !column.length ? fallback : column.length === 1 ? column[0] : column[number]);

function expand(data) {
  const rows = [];
  const add = (what, group, row, number, type, now, ranks) => rows.push({
    what, name: row.names[number], type, pass: group.pass, role: group.role, of: row.of || "", ranks, reason: group.reason, now,
  });
  const each = (groups, visit) => groups.forEach((group) => group.rows.forEach((row) => row.names.forEach((_, number) => visit(group, row, number))));
  each(data.removed_ops, (group, row, number) => add(0, group, row, number, perName(group.op_types, number, ""), perName(group.replaced_by, number, []).join(", "), group.ranks));
  each(data.added_ops, (group, row, number) => add(1, group, row, number, perName(group.op_types, number, ""), "", group.ranks));
  each(data.removed_vars, (group, row, number) => add(2, group, row, number, `${group.dtype} ${shape(row.shape)}, ${bytes(row.bytes)}`, perName(group.replaced_by, number, []).join(", "), group.ranks));
  each(data.added_vars, (group, row, number) => add(3, group, row, number, `${group.dtype} ${localShapes(group.per_rank)}`, "", group.per_rank.map((part) => part.ranks).join(",")));
  return rows;
}
function localShapes(parts) {
  const first = `${shape(parts[0].shape)}, ${bytes(parts[0].bytes)}`;
  return parts.length === 1 ? first : `${first} on ${parts[0].ranks}, ${parts.length - 1} more`;
}

function operatorsSection(data) {
  const rows = expand(data);
  const columns = [
    { label: "what", value: (row) => element("span", { class: `tag ${row.what % 2 ? "good" : "bad"}` }, WHAT[row.what]), sort: (row) => row.what },
    { label: "name", value: (row) => named(row.name), sort: (row) => row.name },
    { label: "type", value: (row) => row.type, sort: (row) => row.type },
    { label: "for", value: (row) => named(row.of), sort: (row) => row.of },
    { label: "pass", value: (row) => row.pass, sort: (row) => row.pass },
    { label: "ranks", value: (row) => cut(row.ranks, 40), sort: (row) => row.ranks },
    { label: "why", value: (row) => row.reason, sort: (row) => row.reason },
    { label: "now", value: (row) => (row.now ? named(row.now) : ""), sort: (row) => row.now },
  ];
  const table = pagedTable("Operators and values that were removed or added", columns, rows, { word: "row", class: "operators", always: true });
  const search = element("input", { type: "search", id: "search", placeholder: "name, parameter, type or reason", autocomplete: "off", spellcheck: "false" });
  const filters = {};
  const filter = (key, label, names) => {
    const found = [...new Set(rows.map((row) => row[key]))].sort();
    filters[key] = element("select", { id: `filter-${key}`, onchange: refresh }, element("option", { value: "" }, "all"), found.map((each) => element("option", { value: each }, names ? names[each] : cut(each, 60) || "none")));
    return element("label", null, label, filters[key]);
  };
  function refresh() {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    table.update(rows.filter((row) => {
      for (const [key, select] of Object.entries(filters)) if (select.selectedIndex && String(row[key]) !== select.value) return false;
      if (!words.length) return true;
      row.text = row.text || `${row.name}\n${row.of}\n${row.type}\n${row.reason}\n${row.now}\n${row.pass}`.toLowerCase();
      return words.every((word) => row.text.includes(word));
    }));
  }
  let waiting = 0;
  search.addEventListener("input", () => { clearTimeout(waiting); waiting = setTimeout(refresh, 120); });
  const clear = element("button", { type: "button", onclick: () => { search.value = ""; Object.values(filters).forEach((each) => { each.selectedIndex = 0; }); refresh(); } }, "Show all");
  const controls = element("form", { class: "controls", role: "search", onsubmit: (event) => { event.preventDefault(); refresh(); } },
    element("label", null, "Search", search), filter("what", "What", WHAT), filter("pass", "Pass"), filter("role", "Role"), filter("ranks", "Ranks"), clear);
  return section("operators", "Operators and values",
    element("p", { class: "hint" }, "All words of a search must occur. gopt explain DIR NAME tells the whole story of one name."), controls, table);
}
