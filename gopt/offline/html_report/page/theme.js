// Light, dark, or as the system has it; kept where the browser lets a file keep something.
const THEMES = ["auto", "light", "dark"];
const themed = [];
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

function startTheme() {
  const button = document.getElementById("theme");
  let theme = "auto";
  try { theme = localStorage.getItem("gopt-report-theme") || "auto"; } catch { /* no storage for this page */ }
  const apply = () => {
    if (theme === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
    button.textContent = `Colours: ${theme}`;
    themed.forEach((redraw) => redraw());
  };
  button.addEventListener("click", () => {
    theme = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
    try { localStorage.setItem("gopt-report-theme", theme); } catch { /* as above */ }
    apply();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", apply);
  if (!THEMES.includes(theme)) theme = "auto";
  apply();
}
