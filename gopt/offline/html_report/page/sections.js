// The other sections, each from its part of the record.
const card = (title, value, small, tone) =>
  element("div", { class: "card" }, element("dt", null, title), element("dd", { class: tone }, value, small ? element("small", null, small) : null));
const OUTCOMES = { equal: ["equal", "good"], different: ["NOT equal", "bad"], unconfirmed: ["NOT confirmed", "warn"] };
const total = (groups) => groups.reduce((sum, each) => sum + each.count, 0);
const rankWord = (data, ranks, many) => `${data.heading.servers ? "" : many ? "ranks " : "rank "}${ranks}`;

function overview(data) {
  const { heading } = data;
  const fullest = data.bars.reduce((most, each) => (heldBy(each.bytes) > heldBy(most.bytes) ? each : most), data.bars[0]);
  const sizes = data.before_after.rows.filter((row) => ["parameters", "optimizer states"].includes(row.what));
  const sum = (column) => sizes.reduce((all, row) => all + (row.values[column] || 0), 0);
  const after = Math.max(...data.before_after.columns.slice(1).map((_, index) => sum(index + 1)));
  const [verdict, tone] = data.proof ? OUTCOMES[data.proof.outcome] : ["not given", ""];
  const most = data.balance.reduce((worst, each) => Math.max(worst, each.ratio), 1);
  const { sent, ratio } = data.traffic;
  return element("dl", { class: "cards" },
    card(heading.servers ? "Trainers and servers" : "Ranks", heading.servers ? `${count(heading.ranks - heading.servers)} + ${count(heading.servers)}` : count(heading.ranks), heading.servers ? null : `mesh ${heading.mesh}`),
    fullest ? card("The fullest holds", bytes(heldBy(fullest.bytes)), "parameters, optimizer states, gradients") : null,
    card("States of the fullest", bytes(after), `${bytes(sum(0))} in the source${saving(sum(0), after) ? `: saves ${saving(sum(0), after)}` : ""}`),
    card("Sent per step", bytes(sent), sent ? `${heading.servers ? "by a trainer" : "mean over ranks"}: ${ratio.toFixed(3)} × minimum` : "by each rank"),
    card("Calls", count(data.figures.calls), `${percent(data.figures.hidden_share)} of bytes overlapped`),
    card("Balance", most.toFixed(3), "largest over mean, the worst kind"),
    card("Operators", `−${count(total(data.removed_ops))} +${count(total(data.added_ops))}`, `${count(heading.nodes)} in the source`),
    card("Proof", verdict, data.proof ? `${count(data.proof.compared)} comparisons` : "gopt verify DIR --json > FILE, --verification FILE", tone));
}

function beforeAfter(data) {
  const { columns, rows } = data.before_after;
  const shown = [
    { label: "", heading: true, value: (row) => row.what },
    ...columns.map((label, index) => ({ label, number: true, value: (row) => amount(row.values[index], row.unit) })),
    ...(columns.length === 2 ? [{ label: "saving", number: true, value: (row) => saving(row.values[0], row.values[1]) }] : []),
  ];
  const roles = [
    { label: "pass", value: (row) => row.pass }, { label: "role", value: (row) => kindName(row.role) },
    ...["removed_ops", "added_ops", "removed_vars", "added_vars"].map((key) => ({ label: key.replace("_", " ").replace("ops", "operators").replace("vars", "values"), number: true, value: (row) => count(row[key]) })),
  ];
  return section("before", "Before and after",
    element("p", { class: "hint" }, "The source beside what holds the most. Live values are those beside states, inputs and constants."),
    element("div", { class: "columns" },
      element("div", null, element("h3", null, "Sizes"), plainTable("Sizes before and after", shown, rows, { class: "wide" })),
      element("div", null, element("h3", null, "By role"),
        data.roles.length ? plainTable("Removed and added, by pass and role", roles, data.roles, { class: "wide wrap" }) : element("p", null, "Nothing was removed or added."))));
}

function memory(data) {
  const source = data.before_after.rows, whole = (what) => source.find((row) => row.what === what)?.values[0] || 0;
  const names = ["source", ...data.bars.map((each) => each.label)];
  const sets = KINDS.map(([key, label], index) => ({ label, colour: `c${index + 1}`, data: [whole(label), ...data.bars.map((each) => each.bytes[key])] }));
  const columns = [
    { label: "role", value: (row) => row.role || "rank", sort: (row) => row.role },
    { label: "ranks", value: (row) => cut(row.ranks, 80), sort: (row) => Number(row.ranks.split(/[-,]/)[0]) },
    { label: "how many", number: true, value: (row) => count(row.count), sort: (row) => row.count },
    ...KINDS.map(([key, label]) => ({ label, number: true, value: (row) => bytes(row.bytes[key]), sort: (row) => row.bytes[key] })),
    { label: "together", number: true, value: (row) => bytes(heldBy(row.bytes)), sort: (row) => heldBy(row.bytes) },
    { label: "sent per step", number: true, value: (row) => bytes(row.sent), sort: (row) => row.sent },
  ];
  const fullest = Math.max(0, ...data.bars.map((each) => heldBy(each.bytes))), sourceTotal = sets.reduce((sum, set) => sum + set.data[0], 0);
  const chart = stackedBars(`Memory: stacked bars of ${names.length - 1 === 1 ? "one group" : `${names.length - 1} groups`} of ranks beside the source. The table below has the numbers.`, names, sets, "bytes");
  // Beside a source that is much larger, the bars of ranks would vanish.
  const toggleBox = element("input", { type: "checkbox", id: "with-source", checked: fullest * 12 >= sourceTotal, onchange: () => withSource(toggleBox.checked) });
  const toggle = element("label", { class: "inline" }, toggleBox, `with the source: ${bytes(sourceTotal)}`);
  function withSource(shown) {
    const from = shown ? 0 : 1;
    chart.chart.data.labels = names.slice(from);
    chart.chart.data.datasets.forEach((set, index) => { set.data = sets[index].data.slice(from); });
    chart.scaleTo(shown ? Math.max(fullest, sourceTotal) : fullest);
  }
  const made = section("memory", "Memory per rank",
    element("p", { class: "hint" }, "Bytes held between steps, and gradients once reduced. Ranks that hold the same are one bar; where too many differ, a bar is the fullest of some neighbours."),
    element("div", { class: "controls" }, toggle), chart, asTable("Memory as a table", () => pagedTable("What ranks hold and send; ranks that are alike share a row", columns, data.ranks, { word: "group" })));
  made.start = () => { chart.start(); withSource(toggleBox.checked); };
  return made;
}

function balance(data) {
  const columns = [
    ...(data.heading.servers ? [{ label: "role", value: (row) => row.role }] : []),
    { label: "kind", heading: !data.heading.servers, value: (row) => kindName(row.kind) },
    { label: "smallest", number: true, value: (row) => bytes(row.smallest) },
    { label: "mean", number: true, value: (row) => bytes(row.mean) },
    { label: "largest", number: true, value: (row) => bytes(row.largest) },
    { label: "held by rank", number: true, value: (row) => count(row.rank) },
    { label: "largest / mean", number: true, value: (row) => element("span", { class: row.ratio > 1.1 ? "warn" : null }, row.ratio.toFixed(3)) },
  ];
  return section("balance", "Balance",
    element("p", { class: "hint" }, "1.000 is even. The step waits for the rank that holds or sends the most."),
    plainTable("Balance over the ranks", columns, data.balance));
}

function traffic(data) {
  if (!data.groups.length) return section("traffic", "Traffic per group", element("p", null, "No rank sends anything."));
  const groups = [...new Set(data.groups.map((each) => each.group))], ops = [...new Set(data.groups.map((each) => each.op))];
  const sent = (group, op) => data.groups.find((each) => each.group === group && each.op === op)?.sent || 0;
  const sets = ops.map((op, index) => ({ label: op, colour: `c${(index % 6) + 1}`, data: groups.map((group) => sent(group, op)) }));
  const over = (group) => (data.heading.servers ? `with ${group}s` : `over ${group}`);
  const columns = [
    { label: "group", heading: true, value: (row) => over(row.group) }, { label: "call", value: (row) => row.op },
    { label: "ranks", number: true, value: (row) => count(row.ranks) }, { label: "calls", number: true, value: (row) => count(row.calls) },
    { label: "sent, mean", number: true, value: (row) => bytes(row.sent) }, { label: "sent, largest", number: true, value: (row) => bytes(row.largest) },
  ];
  const parts = Object.entries(data.traffic.by_kind).map(([kind, nbytes]) => `${bytes(nbytes)} of ${kind}`);
  const chart = stackedBars(`Traffic: bytes that a rank sends in a step, for ${plural(groups.length, "group")}. The table below has the numbers.`, groups.map(over), sets, "bytes");
  const made = section("traffic", "Traffic per group",
    element("p", { class: "hint" }, `Bytes that a rank sends in one update, the mean over the ranks that call. ${data.heading.servers ? "A trainer" : "A rank"} sends ${bytes(data.traffic.sent)}${parts.length ? ` (${parts.join(", ")})` : ""}; the minimum is ${bytes(data.traffic.bound)}.`),
    chart, plainTable("Calls of one update by group", columns, data.groups));
  made.start = chart.start;
  return made;
}

function scheduleSection(data) {
  const { schedule } = data;
  const columns = [
    { label: "member of pp", heading: true, value: (row) => count(row.member) }, { label: "stages", value: (row) => row.stages.join(", ") },
    { label: "actions", number: true, value: (row) => count(row.actions) }, { label: "waits", number: true, value: (row) => percent(row.waits) },
    { label: "live micro-batches, most", number: true, value: (row) => count(row.live) },
  ];
  const picture = document.importNode(new DOMParser().parseFromString(schedule.svg, "image/svg+xml").documentElement, true);
  const formula = schedule.formula === null ? "" : `, by formula ${schedule.formula}`;
  return section("schedule", "Schedule of pipeline stages",
    element("p", { class: "hint" }, "Simulated, with a backward of twice the time of a forward and free transfers. A number is a micro-batch; schedule.txt has every action."),
    element("p", null, named(schedule.name), `, micro-batches: ${count(schedule.micro_batches)}. Members wait ${percent(schedule.bubble)} of the time${formula}.`),
    element("figure", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Schedule of pipeline stages" }, picture),
    plainTable("Members of the pipeline", columns, schedule.members));
}

function proofPart(data) {
  const { proof } = data;
  if (!proof) return [element("p", null, "No result of gopt verify was given: ", element("code", null, `gopt verify ${data.folder} --json > proof.json`), ", then ", element("code", null, `gopt report ${data.folder} --html FILE --verification proof.json`), ".")];
  const [verdict, tone] = OUTCOMES[proof.outcome];
  const worst = [
    { label: "run", heading: true, value: (row) => row.variant }, { label: "furthest off", value: (row) => named(row.name) },
    { label: "kind", value: (row) => kindName(row.kind) }, { label: "rank", number: true, value: (row) => row.rank ?? "" }, { label: "step", number: true, value: (row) => row.step ?? "" },
    { label: "relative error", number: true, value: (row) => (row.error === null ? "not finite" : row.error.toExponential(2)) },
  ];
  const doubts = [{ label: "value", value: (row) => named(row.name) }, { label: "why", value: (row) => row.why }];
  return [
    element("p", null, element("strong", { class: tone }, verdict), `: ${count(proof.compared)} comparisons on ${plural(proof.ranks, "rank")} over ${plural(proof.steps, "step")}, tolerance ${proof.tolerance}. `,
      proof.gradients ? `${count(proof.confirmed)} of ${plural(proof.gradients, "gradient")} confirmed by finite differences.` : "Gradients were not confirmed by finite differences."),
    proof.worst.length ? plainTable("Of each run the value that is furthest off", worst, proof.worst) : null,
    proof.doubts.length ? pagedTable(`Not confirmed: ${plural(proof.unconfirmed, "value")}`, doubts, proof.doubts, { word: "value" }) : null,
    proof.notes.length ? element("ul", { class: "notes" }, proof.notes.map((each) => element("li", null, each))) : null,
  ];
}

function checks(data) {
  const columns = [{ label: "check", heading: true, value: (row) => row.name }, { label: "what holds", value: (row) => row.what }, { label: "on", number: true, value: (row) => count(row.count) }];
  return section("checks", "Checks and proof", element("h3", null, "Proof"), ...proofPart(data),
    element("h3", null, "Checks before writing"), plainTable("Invariants that held of the written ranks", columns, data.checks));
}

function passes(data) {
  const columns = [{ label: "pass", heading: true, value: (row) => row.name }, { label: "options", value: (row) => named(row.options.join(", ")) }, { label: "note", value: (row) => row.note }];
  return section("passes", "Passes and notes",
    plainTable("Passes in order, with their options", columns, data.passes, { class: "wide" }),
    data.notes.length ? [element("h3", null, "Notes"), element("ul", { class: "notes" }, data.notes.map((each) => element("li", null, each)))] : null,
    element("p", { class: "hint" }, `Source: ${data.heading.file}, ${bytes(data.heading.bytes)}, SHA-256 `, named(data.heading.sha256)));
}
