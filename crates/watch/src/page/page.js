"use strict";
// Draws each new status of the daemon. All values from the daemon are inserted as text, never as markup.
const $ = (id) => document.getElementById(id);
const UNKNOWN = "–";

function h(tag, attributes, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value !== undefined && value !== false) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== undefined && child !== null));
  return element;
}
function s(tag, attributes, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}
const known = (value) => value !== undefined && value !== null;
const told = (value, write) => known(value) ? write(value) : UNKNOWN;

// Three digits, as in the commands' output.
function bytes(value) {
  if (!known(value)) return UNKNOWN;
  const sign = value < 0 ? "-" : "";
  let size = Math.abs(value), unit = 0;
  while (size >= 999.5 && unit < 5) { size /= 1024; unit++; }
  const digits = unit === 0 || size >= 99.95 ? 0 : size >= 9.995 ? 1 : 2;
  return `${sign}${size.toFixed(digits)} ${["B", "KiB", "MiB", "GiB", "TiB", "PiB"][unit]}`;
}
// For a cell of the matrix: two digits are enough.
function short(value) {
  if (value < 1 << 20) return "";
  const [size, unit] = bytes(value).split(" ");
  return (size < 10 ? String(+(+size).toFixed(1)) : Math.round(size)) + unit[0];
}
const count = (value) => told(value, (n) => n.toLocaleString("en-US"));
const percent = (value) => told(value, (n) => `${n.toFixed(n < 10 ? 1 : 0)} %`);
function clock(time, seconds) {
  const form = { hour: "2-digit", minute: "2-digit", second: seconds ? "2-digit" : undefined, hour12: false };
  return new Date(time * 1000).toLocaleTimeString([], form);
}
function duration(seconds) {
  const [d, hours, m] = [Math.floor(seconds / 86400), Math.floor(seconds / 3600) % 24, Math.floor(seconds / 60) % 60];
  return d ? `${d} d ${hours} h` : hours ? `${hours} h ${m} min` : m ? `${m} min` : `${Math.floor(seconds)} s`;
}
const word = (text) => h("span", { class: "word" }, text);
const nothing = (text) => h("p", { class: "note" }, text);
const words = (name) => name.replaceAll("_", " ");

// Draws a part only when its data has changed, so that open details and the focus are kept.
const drawn = new Map();
function part(id, data, draw) {
  const text = JSON.stringify(data);
  if (drawn.has(id) && drawn.get(id) === text) return;
  drawn.set(id, text);
  draw(data);
}

function glance(status) {
  const { memory, saved, cpu, bounds, passes, goal } = status;
  const uses = [cpu.ksmd, cpu.pagefold].filter(known);
  const used = uses.length ? uses.reduce((sum, use) => sum + use.percent, 0) : undefined;
  const wanted = goal.keep_available;
  const below = known(wanted) && known(memory.available) && memory.available < wanted;
  const goalOf = below ? "below the goal of" : "goal";
  const goalInWords = known(wanted) ? `${goalOf} ${bytes(wanted)}` : "goal: all profitable merges";
  $("who").textContent = `${status.host}, ${status.version}, up for ${duration(status.uptime_seconds)}`;
  $("state").replaceChildren(word(status.mode), word(status.state), status.why);
  const tile = (name, big, small, bad) => h("div", {}, h("dt", {}, name),
    h("dd", { class: bad ? "big bad" : "big" }, big), h("dd", { class: "small" }, small));
  const both = `ksmd ${percent(cpu.ksmd?.percent)}, pagefold ${percent(cpu.pagefold?.percent)}`;
  const measured = passes.predicted ? percent(100 * passes.measured / passes.predicted) : UNKNOWN;
  // KSM does not count these zero pages, so its own counters are lower by this amount.
  const split = saved.split_zero ? ` (${bytes(saved.split_zero)} zeros in split huge pages)` : "";
  $("tiles").replaceChildren(
    tile("Net savings", bytes(saved.net), `${bytes(saved.gross)} gross${split}, ${bytes(saved.metadata)} metadata`,
      saved.net < 0),
    tile("CPU use, last minute", percent(used), `bound ${percent(bounds.cpu_percent)} of one CPU; ${both}`,
      used > bounds.cpu_percent * 1.5),
    tile("Memory available", bytes(memory.available), `of ${bytes(memory.total)}; ${goalInWords}`, below),
    tile("Measured of predicted savings", measured,
      `${bytes(passes.measured)} of ${bytes(passes.predicted)} in ${count(passes.merges)} merges`),
    tile("COW breaks", count(status.cow_breaks),
      `since the start; ${count(status.huge_pages_split)} huge pages split, ${bytes(memory.anon_huge)} in huge pages`),
    tile("Memory pressure", percent(memory.pressure_percent), "of the last 10 s some task waited for memory"),
  );
  document.title = `${bytes(saved.net)} saved · Pagefold`;
  const last = passes.last;
  const pass = last ? `last pass at ${clock(last.time, true)}, ${last.seconds.toFixed(1)} s` : "no pass yet";
  const daemon = `daemon PID ${status.pid}, ${bytes(status.resident)} resident`;
  $("foot").textContent = `As of ${clock(status.time, true)}; ${count(passes.passes)} passes, ${pass}; ${daemon}.`;
}

// The past: points of /api/history, and points received since.
let points = [];
let span = 0;
let cursor;
const LONGEST = 4000;

function pointOf(status) {
  return {
    time: status.time, saved_gross: status.saved.gross, saved_net: status.saved.net,
    available: status.memory.available, keep_available: status.goal.keep_available,
    ksmd_percent: status.cpu.ksmd?.percent, pagefold_percent: status.cpu.pagefold?.percent,
    bound_percent: status.bounds.cpu_percent,
  };
}
// There is no data for the time between two daemons.
const isUnknown = (p) => !known(p.saved_net) && !known(p.available);
function remember(more) {
  for (const point of more) {
    if (!points.length || point.time > points[points.length - 1].time) points.push(point);
  }
  if (points.length > LONGEST) points = points.filter((p, i) => i % 2 || i > LONGEST / 2 || isUnknown(p));
}

// Steps of 1, 2 and 5, in binary units between powers of 1024.
function step(most, binary) {
  const rough = most / 3;
  if (!(rough > 0)) return 1;
  const unit = binary ? 1024 ** Math.floor(Math.log(rough) / Math.log(1024)) : 1;
  const power = 10 ** Math.floor(Math.log10(rough / unit));
  return unit * power * [1, 2, 5, 10].find((n) => n * power * unit >= rough);
}
function timeStep(length) {
  const steps = [5, 15, 60, 300, 900, 1800, 3600, 7200, 21600, 43200, 86400];
  return steps.find((n) => length / n <= 7) || 86400 * Math.ceil(length / 604800);
}

const CHARTS = {
  saved: { binary: true, area: [["saved", (p) => p.saved_net]] },
  cpu: {
    stack: [["ksmd", (p) => p.ksmd_percent], ["pagefold", (p) => p.pagefold_percent]],
    limit: (p) => p.bound_percent,
  },
  available: { binary: true, area: [["available", (p) => p.available]], limit: (p) => p.keep_available },
};

function shown() {
  if (!span || !points.length) return points;
  const from = points[points.length - 1].time - span;
  return points.filter((point) => point.time >= from);
}

function drawCharts() {
  const some = shown();
  for (const [name, chart] of Object.entries(CHARTS)) {
    const place = document.querySelector(`[data-chart="${name}"]`);
    place.replaceChildren(some.length ? drawChart(name, chart, some) : "no data yet");
  }
}

function drawChart(name, chart, some) {
  const width = Math.max(280, $("charts").clientWidth), height = 132, left = 64, right = 8, top = 8, bottom = 20;
  const first = some[0].time, last = Math.max(some[some.length - 1].time, first + 1);
  const sum = (p) => chart.stack.map(([, of]) => of(p)).filter(known).reduce((total, value) => total + value, 0);
  const series = [...(chart.area || []), ...(chart.stack || [])].map(([, of]) => of);
  if (!some.some((p) => series.some((of) => known(of(p))))) return nothing("No data.");
  const shownAt = (p) => [...series.map((of) => of(p)), chart.stack && sum(p), chart.limit?.(p)];
  const values = some.flatMap(shownAt).filter(known);
  const tick = step(Math.max(...values, chart.binary ? 1 << 20 : 1), chart.binary);
  const ceiling = Math.ceil(Math.max(...values, tick) / tick) * tick;
  const floor = Math.min(...values, 0);
  const x = (time) => left + (time - first) / (last - first) * (width - left - right);
  const y = (value) => top + (ceiling - value) / (ceiling - floor) * (height - top - bottom);
  const svg = s("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img" });
  for (let value = Math.ceil(floor / tick) * tick; value <= ceiling + tick / 2; value += tick) {
    svg.append(s("line", { class: "grid", x1: left, x2: width - right, y1: y(value), y2: y(value) }));
    const label = chart.binary ? bytes(value) : `${+value.toPrecision(3)} %`;
    svg.append(s("text", { x: left - 8, y: y(value) + 4, "text-anchor": "end" }, label));
  }
  const every = timeStep(last - first), zone = new Date(last * 1000).getTimezoneOffset() * 60;
  for (let time = Math.ceil((first - zone) / every) * every + zone; time <= last; time += every) {
    if (x(time) < left + 14 || x(time) > width - 24) continue;
    svg.append(s("text", { x: x(time), y: height - 3, "text-anchor": "middle" }, clock(time, every < 60)));
  }
  // Unknown values leave a gap.
  const runs = (of) => {
    const found = [];
    let run = [];
    for (const p of some) {
      if (known(of(p))) run.push([x(p.time), y(of(p))]);
      else if (run.length) { found.push(run); run = []; }
    }
    return run.length ? [...found, run] : found;
  };
  const path = (run) => "M" + run.map(([a, b]) => `${a.toFixed(1)} ${b.toFixed(1)}`).join("L");
  const end = (run, at) => `L${run.at(at)[0].toFixed(1)} ${y(0).toFixed(1)}`;
  const under = (run) => `${path(run)}${end(run, -1)}${end(run, 0)}Z`;
  for (const [color, of] of chart.area || []) {
    for (const run of runs(of)) {
      svg.append(s("path", { class: `${color} area`, d: under(run) }));
      svg.append(s("path", { class: `${color} curve`, d: path(run) }));
    }
  }
  // Stacked: the upper areas first, each down to the axis, and the lower ones over them.
  (chart.stack || []).map(([color], i) => [color, (p) => {
    const parts = chart.stack.slice(0, i + 1).map(([, of]) => of(p));
    return parts.every(known) ? parts.reduce((a, b) => a + b) : undefined;
  }]).reverse().forEach(([color, of]) => {
    for (const run of runs(of)) svg.append(s("path", { class: `${color} stack`, d: under(run) }));
  });
  for (const run of chart.limit ? runs(chart.limit) : []) svg.append(s("path", { class: "limit", d: path(run) }));
  if (cursor && cursor >= first && cursor <= last) {
    svg.append(s("line", { class: "cursor", x1: x(cursor), x2: x(cursor), y1: top, y2: height - bottom }));
  }
  const now = some[some.length - 1];
  const both = `ksmd ${percent(now.ksmd_percent)}, pagefold ${percent(now.pagefold_percent)}`;
  const summary = {
    saved: `now ${bytes(now.saved_net)}`,
    cpu: `now ${both}, bound ${percent(now.bound_percent)}`,
    available: `now ${bytes(now.available)}, goal ${bytes(now.keep_available)}`,
  }[name];
  svg.setAttribute("aria-label", `From ${clock(first)} to ${clock(last)}: ${summary}`);
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const at = (event.clientX - box.left) * width / box.width;
    point(first + (at - left) / (width - left - right) * (last - first));
  });
  return svg;
}

function point(time) {
  const some = shown();
  if (!some.length) return;
  const nearest = some.reduce((best, p) => Math.abs(p.time - time) < Math.abs(best.time - time) ? p : best);
  cursor = nearest.time;
  const cpu = `ksmd ${percent(nearest.ksmd_percent)}, pagefold ${percent(nearest.pagefold_percent)}`;
  const memory = `${bytes(nearest.saved_net)} saved, ${cpu}, ${bytes(nearest.available)} available`;
  $("point").textContent = `${clock(nearest.time, true)}: ${memory}`;
  drawCharts();
}

function drawPoints() {
  const some = shown(), every = Math.max(1, Math.ceil(some.length / 24));
  const rows = some.filter((_, i) => (some.length - 1 - i) % every === 0).reverse();
  const cells = (p) => [bytes(p.saved_net), bytes(p.saved_gross), percent(p.ksmd_percent), percent(p.pagefold_percent),
    bytes(p.available)].map((text) => h("td", { class: "n" }, text));
  const row = (p) => h("tr", {}, h("th", { scope: "row" }, clock(p.time, true)), ...cells(p));
  $("points").tBodies[0].replaceChildren(...rows.map(row));
}
function drawPast() {
  drawCharts();
  drawPoints();
}

// Columns of workloads and processes: title, sort key, cell, whether numeric (largest first).
const about = (m) => (known(m.footprint_age_seconds) ? "" : "~") + bytes(m.footprint);
const FOOTPRINT = ["Footprint", (m) => m.footprint,
  (m) => h("td", { class: "n" }, told(m.footprint, () => about(m))), true];
const SAVED = ["Saved", (m) => m.saved, (m) => h("td", { class: "n" }, bytes(m.saved)), true];
const BAR = ["", null, (m, most) => h("td", { "aria-hidden": "true" }, meter(m, most))];
const KIND = ["Kind", (m) => m.kind, (m) => h("td", {}, m.kind)];
const DOMAIN = ["Trust domain", (m) => m.domain, (m) => h("td", {}, m.domain)];
const COLUMNS = {
  workloads: [
    ["Name", (w) => w.name, (w) => h("th", { scope: "row" }, w.name)],
    FOOTPRINT, SAVED, BAR,
    ["Processes", (w) => w.processes, (w) => h("td", { class: "n" }, count(w.processes)), true],
    KIND, DOMAIN,
  ],
  processes: [
    ["Process", (m) => m.label, (m) => h("th", { scope: "row" }, m.label)],
    FOOTPRINT, SAVED, BAR,
    ["Resident", (m) => m.resident, (m) => h("td", { class: "n" }, bytes(m.resident)), true],
    KIND, DOMAIN,
    ["Ranges", (m) => m.enrolled_ranges, (m) => h("td", { class: "n" }, count(m.enrolled_ranges)), true],
    ["State", (m) => m.state, (m) => h("td", { class: m.state === "merged" ? "" : "dim" },
      words(m.state), h("br"), h("span", { class: "note" }, m.why))],
  ],
};
let rowsOf = "workloads";
let order = { column: 1, down: true };
let tables = { workloads: [], workloadsOmitted: 0, processes: [], processesOmitted: 0 };

function meter(m, most) {
  if (!known(m.footprint)) return "";
  const bar = h("div", { class: "meter" }, h("i"), h("i"));
  bar.firstChild.style.width = `${100 * m.footprint / most}%`;
  bar.lastChild.style.width = `${100 * (m.saved ?? 0) / most}%`;
  return bar;
}
function drawProcesses() {
  const columns = COLUMNS[rowsOf], all = tables[rowsOf], omitted = tables[`${rowsOf}Omitted`];
  const wanted = $("filter").value.trim().toLowerCase();
  const texts = (m) => [m.name, m.label, m.workload, m.kind, m.domain, m.state, m.cgroup, m.pid && String(m.pid)];
  const fits = (m) => texts(m).some((text) => text?.toLowerCase().includes(wanted));
  const key = columns[order.column][1];
  const compare = (a, b) => {
    const [one, other] = [key(a), key(b)];
    if (!known(one) || !known(other)) return known(other) - known(one);
    const up = typeof one === "string" ? one.localeCompare(other, "en", { numeric: true }) : one - other;
    return order.down ? -up : up;
  };
  const rows = all.filter(fits).sort(compare);
  const most = Math.max(1, ...all.map((m) => (m.footprint ?? 0) + (m.saved ?? 0)));
  const row = (m) => h("tr", { title: m.pid && `pid ${m.pid}${m.cgroup ? ", " + m.cgroup : ""}` },
    ...columns.map(([, , show]) => show(m, most)));
  $("process-table").tBodies[0].replaceChildren(...rows.map(row));
  const rest = omitted ? `; ${count(omitted)} smaller ones are omitted` : "";
  const oldest = Math.max(...all.map((m) => m.footprint_age_seconds ?? -1));
  const read = oldest < 0 ? "" : `, read ${duration(oldest)} ago at most`;
  $("process-note").textContent = `${rows.length} of ${all.length}${rest}. Footprints are fair shares: each page is ` +
    `divided by the number of its mappings${read}. ~ marks an estimate if that is not read yet: resident memory less ` +
    "savings. Saved is an estimate from the host's mean savings for each merged page. The bar shows the footprint " +
    "and, in a pale color, the savings.";
}
function headProcesses() {
  const columns = COLUMNS[rowsOf];
  $("process-table").tHead.rows[0].replaceChildren(...columns.map(([name, key, , number], i) => {
    if (!key) return h("td");
    const button = h("button", { type: "button" }, name);
    button.addEventListener("click", () => {
      order = { column: i, down: order.column === i ? !order.down : Boolean(number) };
      for (const [at, cell] of [...$("process-table").tHead.rows[0].cells].entries()) {
        if (at === i) cell.setAttribute("aria-sort", order.down ? "descending" : "ascending");
        else cell.removeAttribute("aria-sort");
      }
      drawProcesses();
    });
    const sort = i === order.column && "descending";
    return h("th", { scope: "col", class: number && "n", "aria-sort": sort }, button);
  }));
}

function bars(rows) {
  const most = Math.max(1, ...rows.map(([, value]) => value ?? 0));
  return h("dl", { class: "bars" }, ...rows.flatMap(([name, value, kind]) => {
    const bar = h("div", { class: `bar ${kind || ""}`, "aria-hidden": "true" });
    bar.style.width = `${100 * (value ?? 0) / most}%`;
    return [h("dt", {}, h("span", {}, name), bar), h("dd", {}, bytes(value))];
  }));
}
function drawCensus(census) {
  if (!census) return $("census").replaceChildren(nothing("No census yet."));
  const c = census.classes;
  const when = clock(census.time, true);
  const seen = `Resident private anonymous memory of ${count(census.processes)} processes, each from its last census`;
  const unseen = census.unscanned_processes ? `, which could not scan ${count(census.unscanned_processes)} processes` : "";
  const beyond = `${bytes(c.redundant)} of the duplicates are redundant: beyond one copy of each content.`;
  $("census").replaceChildren(
    bars([["merged", c.merged], ["duplicate", c.duplicate], ["zero", c.zero], ["unique", c.unique, "rest"],
      ["volatile", c.volatile, "rest"]]),
    nothing(`${seen}; the latest was at ${when}${unseen}. ${beyond}`));
}
function drawDomains(domains) {
  const rows = domains.map((d) => [`${d.name} (${count(d.tracked_processes)})`, d.saved]);
  $("domains").replaceChildren(rows.length ? bars(rows) : nothing("None yet."));
}
function drawSharing(sharing) {
  if (!sharing?.parties.length) return $("sharing").replaceChildren(nothing("No census yet."));
  const { parties, shared_bytes: shared } = sharing;
  const most = Math.max(1, ...shared.flat());
  const cell = (value, row, column) => {
    const where = row === column ? "are duplicated within it" : `are also in ${parties[column]}`;
    const title = `${parties[row]}: ${bytes(value)} ${where}`;
    const made = h("td", { class: row === column && "own", title }, short(value));
    // By the square root, so that small values stay visible beside large ones.
    made.style.setProperty("--heat-share", `${(Math.sqrt(value / most) * 78).toFixed(1)}%`);
    return made;
  };
  const head = h("tr", {}, h("td"), ...parties.map((name) => h("th", { scope: "col" }, name)));
  const rows = parties.map((name, row) => h("tr", {}, h("th", { scope: "row", title: name }, name),
    ...shared[row].map((value, column) => cell(value, row, column))));
  $("sharing").replaceChildren(h("table", {}, h("thead", {}, head), h("tbody", {}, ...rows)));
}
function drawPlacement(placement) {
  $("placement").hidden = !placement;
  if (!placement) return;
  $("placement-state").replaceChildren(word(placement.mode), word(placement.state), placement.why);
  const last = placement.last_plan;
  const row = (name, value, bad) => h("tr", {}, h("th", { scope: "row" }, name), h("td", { class: bad && "bad" }, value));
  const failures = (name, n) => row(name, count(n), n > 0);
  $("placement-figures").tBodies[0].replaceChildren(
    row("Last plan", last ? `${clock(last.time, true)}: ${last.result}` : "none since the start"),
    row("Virtual machines placed", count(placement.placed_machines)),
    row("Memory moved", bytes(placement.moved_bytes)),
    row("Net gain as planned", `${(placement.placed_gain?.net ?? 0).toFixed(0)} CPU s/h`),
    failures("Placements given up", placement.failed_machines),
    failures("Changes not undone", placement.failed_undos));
}
function drawVmCpus(vms, omitted) {
  $("vm-cpus").hidden = vms.length === 0;
  const percent = (value) => value === undefined ? "-" : `${value.toFixed(1)} %`;
  $("vm-cpus-table").tBodies[0].replaceChildren(...vms.map((vm) => h("tr", {},
    h("th", { scope: "row" }, vm.name), h("td", { class: "number" }, count(vm.vcpus)),
    h("td", { class: "number" }, percent(vm.ready_percent)), h("td", { class: "number" }, percent(vm.run_percent)))));
  $("vm-cpus-omitted").textContent = omitted ? `${count(omitted)} more virtual machines wait less.` : "";
}
function drawDecisions(decisions) {
  $("decisions").tBodies[0].replaceChildren(...decisions.map((d) => h("tr", {},
    h("td", {}, clock(d.time_ms / 1000, true)), h("th", { scope: "row" }, d.kind), h("td", {}, d.subject),
    h("td", {}, d.explanation, " ", h("span", { class: "dim" }, `(${words(d.reason)})`),
      d.carried_out ? "" : h("span", { class: "not-done" }, " not carried out")),
    h("td", { class: "n" }, known(d.predicted) ? bytes(d.predicted) : ""))));
}
function drawFindings(findings) {
  const open = new Set([...$("findings").querySelectorAll("details[open]")].map((one) => one.dataset.rule));
  if (!findings.length) return $("findings").replaceChildren(nothing("No findings."));
  $("findings").replaceChildren(...findings.map((f) => {
    const rule = `${f.rule} ${f.pid ?? ""}`;
    return h("details", { "data-rule": rule, open: open.has(rule) && "" },
      h("summary", {}, h("span", { class: `verdict ${f.verdict}` }, words(f.verdict)), f.title),
      h("div", { class: "body" }, h("p", {}, f.why), h("p", { class: "dim" }, `${f.source}: ${f.value}`),
        f.remedy.length ? h("pre", { tabindex: "0" }, f.remedy.join("\n")) : null));
  }));
}
function drawKsm(ksm) {
  if (!ksm) return $("ksm").replaceChildren(nothing("This kernel has no KSM."));
  const value = (name) => h("td", { class: "n" }, (name === "general_profit" ? bytes : count)(ksm[name]));
  const row = (name) => h("tr", {}, h("th", { scope: "row" }, h("code", {}, name)), value(name));
  $("ksm").replaceChildren(h("table", {}, h("tbody", {}, ...Object.keys(ksm).map(row))));
}

function draw(status) {
  glance(status);
  remember([pointOf(status)]);
  drawPast();
  const { workloads, workloads_omitted: workloadsOmitted } = status;
  const { tracked_processes: processes, tracked_processes_omitted: processesOmitted } = status;
  part("processes", { workloads, workloadsOmitted, processes, processesOmitted }, (all) => {
    tables = all;
    drawProcesses();
  });
  part("census", status.census, drawCensus);
  part("domains", status.domains, drawDomains);
  part("sharing", status.sharing, drawSharing);
  part("placement", status.placement, drawPlacement);
  part("vm-cpus", status.vm_cpus ?? [], (vms) => drawVmCpus(vms, status.vm_cpus_omitted));
  part("decisions", status.decisions, drawDecisions);
  part("findings", status.findings, drawFindings);
  part("ksm", status.ksm, drawKsm);
}

function link(state, text) {
  if ($("link").dataset.link === state) return;
  $("link").dataset.link = state;
  $("link").textContent = text;
}

// Load the past again at each connection: it includes points from the time without one.
function connect() {
  const source = new EventSource("/api/events");
  source.addEventListener("open", async () => {
    link("live", "live");
    const since = points.length ? points[points.length - 1].time : 0;
    const answer = await fetch(`/api/history?since=${since}`).catch(() => undefined);
    if (!answer?.ok) return;
    const past = (await answer.json()).points;
    const all = [...points, ...past].sort((a, b) => a.time - b.time);
    points = [];
    remember(all);
    drawPast();
  });
  source.addEventListener("status", (event) => draw(JSON.parse(event.data)));
  source.addEventListener("error", () => {
    link("lost", "connection lost, reconnecting …");
    source.close();
    setTimeout(connect, 2000);
  });
}

headProcesses();
$("filter").addEventListener("input", drawProcesses);
// Buttons of which one is selected, by an attribute.
function choice(name, chosen) {
  const buttons = [...document.querySelectorAll(`[data-${name}]`)];
  for (const button of buttons) {
    button.addEventListener("click", () => {
      for (const other of buttons) other.setAttribute("aria-pressed", String(other === button));
      chosen(button.dataset[name]);
    });
  }
}
choice("span", (seconds) => {
  span = Number(seconds);
  cursor = undefined;
  drawPast();
});
choice("rows", (whose) => {
  rowsOf = whose;
  order = { column: 1, down: true };
  headProcesses();
  drawProcesses();
});
$("charts").addEventListener("keydown", (event) => {
  const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  const some = shown();
  if (!by || !some.length) return;
  event.preventDefault();
  const at = cursor ? some.findIndex((p) => p.time >= cursor) : some.length;
  point(some[Math.min(some.length - 1, Math.max(0, at + by))].time);
});
$("charts").addEventListener("pointerleave", () => {
  cursor = undefined;
  $("point").textContent = "";
  drawCharts();
});
new ResizeObserver(drawCharts).observe($("charts"));
connect();
