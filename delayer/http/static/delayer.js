// The charts of the page, drawn by uPlot from the figures of /api. Without this file everything else works.
"use strict";
(() => {
  document.documentElement.classList.add("scripts");
  const EVERY_MS = 5000, BACKLOG_EVERY_MS = 30000, HEIGHT = 230, LONG = 900;
  const WHOLE = Array.from({length: 39}, (_, n) => [1, 2, 5][n % 3] * 10 ** Math.floor(n / 3));  // there are no half messages
  const colour = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const drawn = new Map();

  const axis = more => ({stroke: colour("--dim"), grid: {stroke: colour("--line"), width: 1}, ticks: {stroke: colour("--line"), width: 1}, ...more});
  const wide = element => Math.max(element.clientWidth - 16, 200);
  const short = n => n >= 1e6 ? +(n / 1e6).toFixed(1) + " M" : n >= 1e4 ? +(n / 1e3).toFixed(1) + " k" : String(+n.toFixed(2));
  const clock = (at, end) => new Date(at * 1000).toISOString().slice(11, end);
  const numbers = (_, values) => values.map(n => n == null ? "" : short(n));

  function draw(element, data, series, more) {
    const before = drawn.get(element);
    const told = plot => { if (plot.cursor.idx == null) plot.setLegend({idx: more.told}); };
    if (before && before.key === more.key) {
      before.plot.setData(data);
      told(before.plot);
      return;
    }
    if (before) before.plot.destroy();
    element.textContent = "";
    const options = {width: wide(element), height: HEIGHT, padding: [12, 28, 0, 0], cursor: {drag: {x: false, y: false}}, tzDate: at => uPlot.tzDate(new Date(at * 1000), "UTC"), series: [more.first, ...series], ...more.options};
    const plot = new uPlot(options, data, element);
    drawn.set(element, {key: more.key, plot});
    told(plot);
  }

  async function figures(path) {
    const answer = await fetch(path, {headers: {accept: "application/json"}});
    if (!answer.ok) throw new Error(`${path}: ${answer.status}`);
    return answer.json();
  }

  // ---- when it is due

  const due = document.getElementById("due-chart");
  let chosen = "", backlog = null;
  const ahead = {minutes: ["min", 60e3], hours: ["h", 3600e3], days: ["d", 86400e3], months: ["months", 30 * 86400e3]};

  function choose(name) {
    chosen = name;
    if (name) for (const one of document.querySelectorAll("[data-series]")) one.setAttribute("aria-pressed", String(one.dataset.series === name));
  }

  // It opens the first range that has any.
  function drawBacklog() {
    if (!due || !backlog) return;
    if (!chosen) choose(Object.keys(ahead).find(name => backlog.series[name].bars.some(n => n)) ?? "");
    const shown = chosen || "minutes", {bars} = backlog.series[shown], [unit] = ahead[shown];
    const xs = bars.map((_, n) => n + 0.5);
    draw(due, [xs, bars], [{label: "messages due", stroke: colour("--bar"), fill: colour("--bar"), paths: uPlot.paths.bars({size: [0.8, 60], align: 0}), points: {show: false}, value: (_, n) => n == null ? "–" : n.toLocaleString("en")}], {
      key: shown + dark.matches,
      told: 0,
      first: {label: "due within", value: (_, n) => n == null ? "–" : `${Math.ceil(n)} ${unit}`},
      options: {
        scales: {x: {time: false, range: [0, bars.length]}, y: {range: (_, low, high) => [0, Math.max(high, 1)]}},
        axes: [axis({values: (_, values) => values.map(n => n === 0 ? "now" : `${n} ${unit}`)}), axis({values: numbers, size: 60, incrs: WHOLE})],
      },
    });
    document.getElementById("due-note").textContent = backlog.note;
  }

  async function lookAtBacklog() {
    if (!due) return;
    backlog = await figures(due.dataset.source);
    drawBacklog();
  }

  for (const button of document.querySelectorAll("[data-series]")) {
    button.addEventListener("click", () => {
      choose(button.dataset.series);
      drawBacklog();
    });
  }

  // ---- rates and lateness

  const rates = document.getElementById("rates-chart"), late = document.getElementById("late-chart");
  let live = null;

  function drawLive() {
    if (!rates || !live) return;
    const {t, parked, released, cascaded, p50_ms, p99_ms} = live.series;
    const into = parked.map((n, at) => n + cascaded[at]);
    // A line needs two neighbours: a step before and after which there was nothing is a dot.
    const alone = (plot, one) => plot.data[one].flatMap((n, at, all) => n != null && all[at - 1] == null && all[at + 1] == null ? [at] : []);
    const line = (label, stroke, more) => ({label, stroke, width: 2, points: {show: false, filter: alone, size: 7, fill: stroke}, value: (_, n) => n == null ? "–" : short(n), ...more});
    const first = {label: "at", value: (_, at) => at == null ? "–" : clock(at, 19)};
    const options = {axes: [axis({space: 60, values: (_, ats) => ats.map(at => clock(at, 16))}), axis({values: numbers, size: 60})], scales: {x: {range: () => [Date.now() / 1000 - LONG, Date.now() / 1000]}, y: {range: (_, low, high) => [0, Math.max(high || 0, 1)]}}};
    const key = String(dark.matches), told = t.length - 1;
    draw(rates, [t, into, released], [line("in", colour("--first")), line("out", colour("--second"), {dash: [6, 3]})], {key, told, first, options});
    draw(late, [t, p50_ms, p99_ms], [line("median", colour("--first")), line("p99", colour("--second"), {dash: [6, 3]})], {key, told, first, options});
  }

  async function lookAtRates() {
    if (!rates) return;
    live = await figures(rates.dataset.source);
    drawLive();
  }

  // ---- all of a list at once

  for (const label of document.querySelectorAll("label.all")) {
    const all = label.querySelector("input"), boxes = [...label.closest("form").querySelectorAll("tbody input")];
    label.hidden = false;
    all.addEventListener("change", () => { for (const one of boxes) one.checked = all.checked; });
    for (const one of boxes) one.addEventListener("change", () => { all.checked = boxes.every(box => box.checked); });
  }

  // ---- a list of which nothing was chosen: say so where it is, and keep what was written

  for (const form of document.querySelectorAll("form.list")) {
    form.addEventListener("keydown", event => {
      if (event.key === "Enter" && event.target.type === "checkbox") event.preventDefault();
    });
    form.addEventListener("submit", event => {
      if (form.querySelector("tbody input:checked")) return;
      event.preventDefault();
      const line = form.querySelector(".wrong");
      line.textContent = "Choose at least one message.";
      line.hidden = false;
    });
  }

  // ---- a body of JSON: indented, with its strings and numbers as they are written

  function indented(text) {
    const tokens = text.match(/"(?:\\.|[^"\\])*"|[[\]{},:]|[^[\]{},:"\s]+/g);
    let depth = 0;
    return tokens.map((token, at) => {
      const next = tokens[at + 1], opens = "{[".includes(token), closes = next === "}" || next === "]";
      depth += opens - closes;
      const ends = (opens && !closes) || token === "," || (closes && !opens);
      return (token === ":" ? ": " : token) + (ends ? "\n" + "  ".repeat(Math.min(depth, 20)) : "");
    }).join("");
  }

  for (const body of document.querySelectorAll("pre.body")) {
    try {
      if (typeof JSON.parse(body.textContent) === "object") body.textContent = indented(body.textContent);
    } catch { /* Other text stays as it is. */ }
  }

  // ---- times in the reader's own zone, beside UTC

  const zone = new Intl.DateTimeFormat("en-GB", {day: "numeric", month: "short", hour: "2-digit", minute: "2-digit", second: "2-digit", timeZoneName: "short"});
  for (const time of document.querySelectorAll("time")) {
    const at = new Date(time.dateTime);
    if (isNaN(at) || !at.getTimezoneOffset()) continue;
    const local = document.createElement("span");
    local.className = "dim t";
    local.textContent = `(${zone.format(at)})`;
    time.after(" ", local);
  }

  // ---- how far off an instant is, as core/readable.py writes it

  const UNITS = [["years", 31557600], ["d", 86400], ["h", 3600], ["min", 60], ["s", 1]];
  function away(at) {
    let rest = Math.floor(Math.abs(at - Date.now()) / 1000);
    const parts = [];
    for (const [unit, length] of UNITS) {
      const count = Math.floor(rest / length);
      if (count) parts.push(`${count} ${unit === "years" && count === 1 ? "year" : unit}`);
      if (parts.length === 2 || (parts.length && !count)) break;
      rest %= length;
    }
    const text = parts.join(" ");
    return !text ? "now" : at > Date.now() ? `in ${text}` : `${text} ago`;
  }

  setInterval(() => {
    if (document.hidden) return;
    for (const one of document.querySelectorAll("[data-at]")) {
      const at = Number(one.dataset.at), late = Date.now() - at;
      // The look may be some seconds old, and its message gone.
      one.textContent = "next" in one.dataset && late > 0 && late < 30000 ? "now" : away(at);
    }
  }, 1000);

  // ---- a calendar beside each field for an instant, in the reader's own zone

  for (const field of document.querySelectorAll("input.instant")) {
    const picker = document.createElement("input");
    picker.type = "datetime-local";
    picker.step = 1;
    picker.className = "picker";
    picker.setAttribute("aria-label", `${field.labels[0].textContent}, local time`);
    picker.addEventListener("change", () => {
      if (picker.value) field.value = new Date(picker.value).toISOString().replace(".000Z", "Z");
    });
    field.after(picker);
  }

  // ---- a table sorted by one of its columns

  const value = cell => cell.dataset.sort ?? cell.querySelector("[data-at]")?.dataset.at ?? cell.querySelector("time")?.dateTime ?? cell.textContent.trim();
  const order = new Intl.Collator("en", {numeric: true}).compare;
  for (const table of document.querySelectorAll("table.sortable")) {
    const body = table.tBodies[0];
    if (body.rows.length < 2) continue;
    [...table.tHead.rows[0].cells].forEach((head, column) => {
      if (!head.textContent.trim() || head.querySelector(".hidden")) return;
      const button = document.createElement("button");
      button.type = "button";
      button.className = "sort";
      button.textContent = head.textContent;
      if ("part" in table.dataset) button.title = "Sorts the rows of this page, not the whole list";
      head.replaceChildren(button);
      button.addEventListener("click", () => {
        const up = head.ariaSort !== "ascending";
        for (const other of table.tHead.rows[0].cells) other.ariaSort = null;
        head.ariaSort = up ? "ascending" : "descending";
        if ("part" in table.dataset && !table.querySelector("caption")) {
          table.createCaption().setAttribute("role", "status");
          table.caption.textContent = "Sorted: the rows of this page, not the whole list. A filter makes the list shorter.";
        }
        const bare = text => text.replace(/\u202f/g, "");
        body.append(...[...body.rows].sort((one, other) => (up ? 1 : -1) * order(bare(value(one.cells[column])), bare(value(other.cells[column])))));
      });
    });
  }

  // ---- again and again, but not while nobody looks

  function every(milliseconds, look) {
    const again = async () => {
      if (!document.hidden) {
        try { await look(); } catch (error) { console.warn(String(error)); }
      }
      setTimeout(again, milliseconds);
    };
    again();
  }

  const redraw = () => { drawBacklog(); drawLive(); };
  dark.addEventListener("change", redraw);
  addEventListener("resize", () => { for (const [element, {plot}] of drawn) plot.setSize({width: wide(element), height: HEIGHT}); });
  every(BACKLOG_EVERY_MS, lookAtBacklog);
  every(EVERY_MS, lookAtRates);
})();
