// Puts the page together.
function start() {
  const data = JSON.parse(document.getElementById("data").textContent);
  const { heading } = data;
  document.getElementById("title").textContent = `${heading.file} · ${data.folder}`;
  const asked = [
    heading.stage === null ? null : `stage ${heading.stage}`,
    heading.servers ? `${plural(heading.ranks - heading.servers, "trainer")}, ${plural(heading.servers, "server")}` : `${plural(heading.ranks, "rank")}, mesh ${heading.mesh}`,
    heading.partition === null ? null : `${heading.partition} partition`,
    heading.accumulate > 1 ? `${plural(heading.accumulate, "micro-step")} per update` : null,
  ];
  document.getElementById("asked").textContent = asked.filter(Boolean).join(", ");
  const sections = [beforeAfter, memory, balance, traffic, ...(data.schedule ? [scheduleSection] : []), timelineSection, operatorsSection, checks, passes].map((make) => make(data));
  const main = document.getElementById("main");
  main.append(overview(data), ...sections);
  document.getElementById("nav").append(...sections.map((each) => element("li", null, element("a", { href: `#${each.id}` }, each.querySelector("h2").textContent))));
  sections.forEach((each) => each.start && each.start());
  startTheme();
  document.documentElement.dataset.ready = "true";
}
start();
