// The page: timelines that share a view, buttons, what is told of an op, lists that lead to timelines.

class Page {
  constructor(data) {
    this.panels = unpack(data);
    this.cap = data.cap;
    this.view = new View(Math.max(...this.panels.map((panel) => panel.duration), 0));
    const most = Math.max(...this.panels.map((panel) => Math.max(panel.peak, panel.declared)), 1);
    // A cap far above all curves would flatten them.
    this.topSize = this.cap !== null && this.cap <= 3 * most ? Math.max(most, this.cap) : most;
    this.colors = readColors();
    this.details = document.getElementById("details");
    this.tipElement = document.getElementById("tip");
    this.timelines = [...document.querySelectorAll(".drawing")].map(
      (holder) => new Timeline(holder, this.panels[Number(holder.dataset.panel)], this),
    );
    this.say("");
    this.view.onChange(() => this.redraw());
    this.watch();
    this.buttons();
    this.themes();
    this.printing();
    this.lists();
    this.redraw();
  }

  // Timelines are drawn when they come into view.
  watch() {
    const of = new Map(this.timelines.map((timeline) => [timeline.canvas, timeline]));
    const seen = new IntersectionObserver((entries) => {
      for (const entry of entries) {
        const timeline = of.get(entry.target);
        timeline.isVisible = entry.isIntersecting;
        if (timeline.isVisible) timeline.draw();
      }
    }, { rootMargin: "300px" });
    const sized = new ResizeObserver(() => this.view.changed());
    for (const timeline of this.timelines) seen.observe(timeline.canvas);
    sized.observe(document.body);
  }

  redraw() {
    for (const timeline of this.timelines) if (timeline.isVisible) timeline.draw();
    const { begin, end, longest } = this.view;
    const isWhole = end - begin > longest * 0.9999;
    document.getElementById("range").textContent = `${ms(begin)} to ${ms(end)}${isWhole ? ", all" : ""}`;
  }

  buttons() {
    const on = (id, act) => document.getElementById(id).addEventListener("click", act);
    on("in", () => this.view.zoom(1.6));
    on("out", () => this.view.zoom(1 / 1.6));
    on("fit", () => this.view.fit());
    on("help", () => document.getElementById("keys").showModal());
    document.addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey || document.getElementById("keys").open) return;
      const act = {
        "+": () => this.view.zoom(1.6),
        "=": () => this.view.zoom(1.6),
        "-": () => this.view.zoom(1 / 1.6),
        0: () => this.view.fit(),
        "?": () => document.getElementById("keys").showModal(),
      }[event.key];
      const isFree = event.target === document.body || event.target.closest(".tools") !== null;
      const pan = isFree && { ArrowLeft: -0.1, ArrowRight: 0.1 }[event.key];
      if (act) act();
      else if (pan) this.view.pan(this.view.span * pan);
      else return;
      event.preventDefault();
    });
  }

  themes() {
    const button = document.getElementById("theme"), root = document.documentElement;
    const next = { auto: "light", light: "dark", dark: "auto" };
    let now = "auto";
    button.addEventListener("click", () => {
      now = next[now];
      if (now === "auto") delete root.dataset.theme;
      else root.dataset.theme = now;
      button.textContent = `Theme: ${now}`;
      this.recolor();
    });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.recolor());
  }

  recolor() {
    this.colors = readColors();
    this.view.changed();
  }

  // On paper all timelines are there, and light.
  printing() {
    const root = document.documentElement;
    let before;
    window.addEventListener("beforeprint", () => {
      before = root.dataset.theme;
      root.dataset.theme = "light";
      this.colors = readColors();
      for (const timeline of this.timelines) timeline.draw();
    });
    window.addEventListener("afterprint", () => {
      if (before === undefined) delete root.dataset.theme;
      else root.dataset.theme = before;
      this.recolor();
    });
  }

  point(time) {
    for (const timeline of this.timelines) if (timeline.isVisible) timeline.pointAt(time);
  }

  sectionName(panel) { return document.getElementById(`h${panel.section}`).textContent; }

  select(selected) {
    this.view.select(selected);
    if (selected === null) { this.say(""); return; }
    const { bar, panel } = selected;
    const told = sentences(bar, panel).map(([, sentence]) => sentence).join(" ");
    this.say(`${nameOf(bar)} (${this.sectionName(panel)}, ${panel.title}). ${told}`);
  }

  say(words) {
    this.details.textContent = words
      || "Select an op: click it, or go to a timeline with Tab and press an arrow key, or e for what is exposed.";
  }

  tip(of, x, y) {
    const tip = this.tipElement;
    tip.style.display = of ? "block" : "none";
    if (!of) return;
    const name = document.createElement("b");
    name.textContent = nameOf(of.bar);
    tip.replaceChildren(name, ...sentences(of.bar, of.panel).map(([kind, sentence]) => {
      const line = document.createElement("div");
      line.className = kind;
      line.textContent = sentence;
      return line;
    }));
    const box = tip.getBoundingClientRect();
    tip.style.left = `${Math.max(4, Math.min(x + 14, innerWidth - box.width - 8))}px`;
    tip.style.top = `${y + 18 + box.height < innerHeight ? y + 18 : Math.max(4, y - box.height - 12)}px`;
  }

  // Ops in lists are buttons that lead to them; a list that is cut has a button for the rest.
  lists() {
    for (const table of document.querySelectorAll("table.exposed[data-panel]")) {
      const timeline = this.timelines.find((one) => one.panel.number === Number(table.dataset.panel));
      if (timeline === undefined) continue;
      for (const row of table.tBodies[0].rows) this.link(row, timeline);
      const more = table.closest("details").querySelector("p.more");
      if (more === null) continue;
      const button = document.createElement("button");
      button.type = "button";
      button.className = "link more";
      button.textContent = "Show all";
      button.addEventListener("click", () => { this.rest(table, timeline); more.remove(); });
      more.append(" ", button);
    }
  }

  link(row, timeline) {
    const bar = timeline.panel.bars[Number(row.dataset.bar)];
    const cell = row.querySelector(".op"), button = document.createElement("button");
    button.type = "button";
    button.className = "link";
    button.textContent = cell.textContent;
    button.addEventListener("click", () => {
      timeline.canvas.closest("details:not([open])")?.setAttribute("open", "");
      this.view.zoomTo(bar);
      this.select({ bar, panel: timeline.panel });
      timeline.canvas.focus({ preventScroll: true });
      timeline.canvas.scrollIntoView({ block: "center" });
    });
    cell.replaceChildren(button);
  }

  rest(table, timeline) {
    const body = table.tBodies[0];
    const shown = new Set([...body.rows].map((row) => Number(row.dataset.bar)));
    const others = timeline.panel.bars.filter((bar) => bar.exposed > 0 && !shown.has(bar.index));
    for (const bar of others.sort((a, b) => b.exposed - a.exposed)) {
      const row = body.insertRow();
      row.dataset.bar = bar.index;
      const why = bar.why ? bar.why.join("; ") : "left out for its size";
      [bar.name, timeline.panel.lanes[bar.lane], ms(bar.end - bar.begin), ms(bar.exposed), why].forEach((words, i) => {
        const cell = i === 0 ? row.appendChild(document.createElement("th")) : row.insertCell();
        cell.className = ["words op", "words", "", "", "words wide"][i];
        cell.textContent = words;
      });
      this.link(row, timeline);
    }
  }
}

document.documentElement.classList.add("js");
window.commplan = new Page(JSON.parse(document.getElementById("data").textContent));
