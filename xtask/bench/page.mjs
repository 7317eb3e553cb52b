// Opens a large report and the same samples in speedscope, in headless Chromium, by turns. Arguments: the tools' directory, the
// report, rounds, the speedscope file, and one of a tenth of the samples, which takes its turns if speedscope cannot load the first. Prints one JSON object of lists of costs, in the order of the rounds: milliseconds that passed,
// and of the page's main thread those in which it ran and those in which it was ready while no CPU ran it.
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";

const [tools, report, rounds, ...speedscopes] = process.argv.slice(2);
const require = createRequire(`${tools}/package.json`);
const { chromium } = require("playwright-core");
const args = [
  "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
  "--disable-component-update", "--disable-sync",
];

// Runs in the page before its own script. `painted` is when the frame with the last change so far was drawn: the next one begins.
function watch() {
  const seen = (globalThis.seen = { input: 0, changed: 0, painted: 0, graph: 0, all: 0 });
  let waits = false;
  const changed = () => {
    seen.changed = performance.now();
    if (waits) return;
    waits = true;
    requestAnimationFrame(() => requestAnimationFrame(() => { waits = false; seen.painted = performance.now(); }));
  };
  for (const name of ["clearRect", "fillRect"]) {
    const own = CanvasRenderingContext2D.prototype[name];
    CanvasRenderingContext2D.prototype[name] = function (...numbers) {
      changed();
      return own.apply(this, numbers);
    };
  }
  for (const name of ["input", "change", "click", "mouseup", "keydown"])
    addEventListener(name, (event) => { seen.input = event.timeStamp; }, { capture: true });
  const isDrawn = (canvas) => canvas.width > 0 && canvas.height > 0
    && new Uint32Array(canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data.buffer).filter((pixel) => pixel !== 0).length > 10000;
  const look = (now) => {
    if (!seen.graph) {
      const canvas = document.querySelector("#boxes");
      if (canvas && isDrawn(canvas)) requestAnimationFrame((now) => { seen.graph = now; });
    }
    if (document.querySelectorAll("#functions tbody tr").length > 10 && document.querySelector("#time-line canvas") && seen.graph) seen.all = now;
    else requestAnimationFrame(look);
  };
  addEventListener("DOMContentLoaded", () => {
    requestAnimationFrame(look);
    new MutationObserver(changed).observe(document, { subtree: true, childList: true, characterData: true, attributes: true });
  });
}

/** Pid of the page's process: the one of all pages' that has most memory. */
async function renderer(browser) {
  const session = await browser.newBrowserCDPSession();
  const { processInfo } = await session.send("SystemInfo.getProcessInfo");
  const pids = processInfo.filter(({ type }) => type === "renderer").map(({ id }) => id);
  return pids.reduce((most, pid) => (memory(pid) > memory(most) ? pid : most));
}

/** Resident memory, in MiB. */
function memory(pid) {
  return Number(/VmRSS:\s+(\d+)/.exec(readFileSync(`/proc/${pid}/status`, "utf8"))?.[1] ?? 0) / 1024;
}

/** Milliseconds in which the main thread ran and waited for a CPU, since the process began (the kernel's Documentation/scheduler/sched-stats.rst). */
function scheduled(pid) {
  const [ran, waited] = readFileSync(`/proc/${pid}/schedstat`, "utf8").split(" ").map((ns) => Number(ns) / 1e6);
  return { ran, waited };
}

/** Opens a browser of its own: what an earlier page left behind costs no later one. */
async function fresh(work) {
  const browser = await chromium.launch({ executablePath: "/usr/bin/chromium", headless: true, args });
  try {
    const page = await browser.newPage({ viewport: { width: 1400, height: 900 } });
    page.on("pageerror", (error) => { throw error; });
    await work(page, browser);
  } finally {
    await browser.close();
  }
}

const found = { first: [], all: [], filters: {}, memory: [], speedscope: [], speedscope_memory: [], crashed_after: null, marks: {} };
const note = (lists, name, value) => (lists[name] ??= []).push(value);

/** From the last input event until nothing changes any more: the moment at which that was drawn. */
async function settled(page) {
  return page.evaluate(() => new Promise((done) => {
    const look = () => {
      const { input, changed, painted } = globalThis.seen;
      if (painted > input && painted > changed && performance.now() - painted > 300) done(painted - input);
      else setTimeout(look, 100);
    };
    look();
  }));
}

async function ours() {
  await fresh(async (page, browser) => {
    await page.addInitScript(watch);
    await page.goto(`file://${report}`);
    await page.waitForFunction(() => globalThis.seen.all > 0, null, { timeout: 120000 });
    const pid = await renderer(browser), cost = scheduled(pid);
    const { graph, all, marks } = await page.evaluate(() => ({ ...globalThis.seen,
      marks: Object.fromEntries(performance.getEntriesByType("mark").map(({ name, startTime }) => [name, startTime])) }));
    found.first.push({ passed: graph, ...cost });
    found.all.push({ passed: all, ...cost });
    for (const [name, time] of Object.entries(marks)) note(found.marks, name, time);
    await page.waitForTimeout(500);
    found.memory.push(memory(pid));
    const filter = async (name, act) => {
      await page.evaluate(() => { globalThis.seen.input = performance.now(); globalThis.seen.painted = 0; });
      const before = scheduled(pid);
      await act();
      const passed = await settled(page), after = scheduled(pid);
      note(found.filters, name, { passed, ran: after.ran - before.ran, waited: after.waited - before.waited });
    };
    const reset = async () => {
      await page.evaluate(() => document.activeElement?.blur());
      await page.mouse.move(2, 2);
      await page.keyboard.press("a");
      await settled(page);
    };
    for (const text of ["method_12", "^Class3", "crypto"]) {
      await page.focus("input[type=search]");
      await filter("search", () => page.keyboard.insertText(text));
      await reset();
    }
    for (const [name, id] of [["process", "#process"], ["thread", "#thread"], ["module", "#module"]])
      for (const index of [1, 2, 3]) {
        await filter(name, () => page.selectOption(id, { index }));
        await reset();
      }
    for (const [from, to] of [[0.2, 0.3], [0.1, 0.6], [0.5, 0.52]]) {
      const over = await page.locator("#time-line .u-over").boundingBox();
      await page.mouse.move(over.x + over.width * from, over.y + 20);
      await page.mouse.down();
      await page.mouse.move(over.x + over.width * to, over.y + 20, { steps: 3 });
      await filter("range", () => page.mouse.up());
      await reset();
    }
    for (const place of [0, 1, 2]) {
      await filter("function", () => page.locator("#functions .name button").nth(place).click());
      await reset();
      await page.keyboard.press("Escape");
      await settled(page);
    }
    for (const row of [2, 4, 6]) {
      const graph = await page.locator("#graph").boundingBox();
      await page.mouse.move(graph.x + 40, graph.y + 20 * row + 10);
      await settled(page);
      await filter("zoom", () => page.mouse.click(graph.x + 40, graph.y + 20 * row + 10));
      await reset();
      await page.keyboard.press("Escape");
      await settled(page);
    }
    for (const [name, key, back] of [["inverted", "v", "i"], ["native", "n", "n"]]) {
      await filter(name, () => page.keyboard.press(key));
      await filter(`${name}, back`, () => page.keyboard.press(back));
    }
  });
}

/** Whether speedscope has loaded a file. */
async function theirs(speedscope) {
  let loads = true;
  await fresh(async (page, browser) => {
    await page.goto(`file://${tools}/node_modules/speedscope/dist/release/index.html`);
    await page.waitForSelector("input[type=file]", { state: "attached" });
    await page.waitForTimeout(500);
    const pid = await renderer(browser), before = scheduled(pid);
    await page.evaluate(() => {
      globalThis.loaded = null;
      addEventListener("change", (event) => {
        const start = event.timeStamp;
        const look = () => {
          const isShown = document.body.innerText.includes("Sandwich") && document.querySelector("canvas");
          requestAnimationFrame(isShown ? () => requestAnimationFrame((now) => { globalThis.loaded = now - start; }) : look);
        };
        look();
      }, { capture: true, once: true });
    });
    const begun = performance.now();
    const crashed = new Promise((done) => page.on("crash", () => { loads = false; done(); }));
    await page.setInputFiles("input[type=file]", speedscope);
    const loaded = page.waitForFunction(() => globalThis.loaded, null, { timeout: 1200000 }).catch((error) => { if (loads) throw error; });
    await Promise.race([loaded, crashed]);
    if (!loads) {
      found.crashed_after = performance.now() - begun;
      return;
    }
    const after = scheduled(pid), passed = await page.evaluate(() => globalThis.loaded);
    found.speedscope.push({ passed, ran: after.ran - before.ran, waited: after.waited - before.waited });
    await page.waitForTimeout(500);
    found.speedscope_memory.push(memory(pid));
  });
  return loads;
}

for (let round = 0; round < Number(rounds); round++) {
  await ours();
  if (speedscopes.length > 0 && !(await theirs(speedscopes[0]))) {
    speedscopes.shift();
    await theirs(speedscopes[0]);
  }
}
console.log(JSON.stringify(found));
