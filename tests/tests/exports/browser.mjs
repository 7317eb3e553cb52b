// Opens what we wrote in headless Chromium. Arguments: the tools' directory, flame graph page, speedscope file,
// directory for screenshots. Prints one JSON object; a failed step is an exception.
import { createRequire } from "node:module";
import { readFileSync, writeFileSync } from "node:fs";

const [tools, page_path, speedscope_path, shots] = process.argv.slice(2);
const require = createRequire(`${tools}/package.json`);
const { chromium } = require("playwright-core");
const args = [
  "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
  "--disable-component-update", "--disable-sync",
];
const browser = await chromium.launch({ executablePath: "/usr/bin/chromium", headless: true, args });
const found = { errors: [], requests: [] };
try {
  const page = await browser.newPage({ viewport: { width: 1300, height: 800 } });
  page.on("pageerror", (error) => found.errors.push(error.message));
  page.on("request", (request) => found.requests.push(request.url()));
  await page.goto(`file://${page_path}`);
  await page.waitForSelector("#frames > g");
  await page.waitForTimeout(300);
  found.caption = await page.textContent("#caption");
  const widths = (name) => page.locator("#frames > g").evaluateAll((groups, name) => groups
    .filter((group) => group.querySelector("title").textContent.startsWith(name))
    .map((group) => Math.round(group.querySelector("rect").getBoundingClientRect().width)), name);
  found.colours = await page.locator("#frames > g").evaluateAll((groups) => Object.fromEntries(groups.map(
    (group) => [group.querySelector("title").textContent.split(" (")[0], group.querySelector("rect").getAttribute("fill")])));
  // In a window that is too low for the stacks.
  const top = (name) => page.locator("#frames > g").evaluateAll((groups, name) => groups
    .filter((group) => group.querySelector("title").textContent.startsWith(name))
    .map((group) => group.querySelector("rect").getBoundingClientRect().top), name);
  await page.setViewportSize({ width: 1300, height: 150 });
  await page.reload();
  await page.waitForSelector("#frames > g");
  found.root_top = (await top("all"))[0];
  await page.setViewportSize({ width: 1300, height: 800 });
  await page.fill("#term", "^leaf");
  await page.waitForTimeout(200);
  found.share = await page.textContent("#share");
  found.whole = await widths("all");
  found.before = await widths("middle");
  await page.locator("#frames > g", { hasText: "middle" }).first().click();
  await page.waitForTimeout(200);
  found.zoomed = await widths("middle");
  await page.screenshot({ path: `${shots}/zoomed.png` });
  await page.click("#whole");
  await page.waitForTimeout(200);
  found.unzoomed = await widths("middle");
  await page.click("#turn");
  await page.waitForTimeout(300);
  found.leaf_reversed = await widths("leaf");
  found.share_reversed = await page.textContent("#share");
  await page.screenshot({ path: `${shots}/reversed.png` });
  found.requests = found.requests.filter((url) => !url.startsWith("file://"));

  const base64 = readFileSync(speedscope_path).toString("base64");
  const loader = `${shots}/speedscope.js`;
  writeFileSync(loader, `speedscope.loadFileFromBase64("profile.speedscope.json", "${base64}")`);
  const viewer = await browser.newPage({ viewport: { width: 1300, height: 800 } });
  const index = `${tools}/node_modules/speedscope/dist/release/index.html`;
  await viewer.goto(`file://${index}#localProfilePath=${loader}`);
  await viewer.waitForFunction(() => document.body.innerText.includes("Sandwich"), null, { timeout: 30000 });
  found.speedscope = await viewer.evaluate(() => document.body.innerText);
  await viewer.screenshot({ path: `${shots}/speedscope.png` });
} finally {
  await browser.close();
}
console.log(JSON.stringify(found));
