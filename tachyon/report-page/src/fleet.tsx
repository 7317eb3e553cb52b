// The overview of a fleet: services and their functions over time, what changed with new versions, and which hosts lose samples.

import { render } from "preact";
import { useEffect, useLayoutEffect, useMemo, useRef, useState } from "preact/hooks";
import uPlot from "uplot";
import { shown } from "./words";

type FunctionLine = { name: string; file: string; own: number; total: number; line: number[] };
type ServiceLine = { name: string; seconds: number; line: number[]; versions: [string, number][]; functions: FunctionLine[] };
type ChangeLine = { name: string; file: string; before: number; after: number; interval: [number, number] | null; moved_to: string | null };
type ServiceChange = { service: string; old: string; new: string; whole: [number, number, boolean]; visible: number | null; changes: ChangeLine[] };
type Loss = { host: string; stored: number; lost: number; lost_ppm: number; recovered: number };
type Overview = {
  root: string; start_ms: number; part_ms: number; parts: number; hosts: number; stored: number; lost: number;
  services: ServiceLine[]; more_services: number; changes: ServiceChange[]; losses: Loss[];
};

/** Told apart by people who see few colours, too (Okabe and Ito); the last is for the rest. */
const COLOURS = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#b8a900", "#8a8d93"];
const DRAWN = COLOURS.length - 1;
const HEIGHT = 200;

const decimals = (number: number, digits: number) => number.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
const whole = (number: number) => Math.round(number).toLocaleString("en");
const percent = (share: number, digits = 1) => `${decimals(share * 100, digits)} %`;
const date = (ms: number) => new Date(ms).toISOString().slice(0, 16).replace("T", " ");
/** On an axis: the day at its beginning, otherwise the time. */
const moment = (seconds: number) => { const text = new Date(seconds * 1e3).toISOString(); return text.slice(11, 16) === "00:00" ? text.slice(5, 10) : text.slice(11, 16); };
const cpu = (seconds: number) => (seconds >= 36_000 ? `${whole(seconds / 3600)} h` : seconds >= 3600 ? `${decimals(seconds / 3600, 1)} h` : seconds >= 60 ? `${whole(seconds / 60)} min` : `${decimals(seconds, 1)} s`);

function Spark({ line, marks }: { line: number[]; marks: number[] }) {
  const high = Math.max(...line, 1e-9), width = 132, height = 22, step = width / Math.max(1, line.length);
  const points = line.map((value, at) => `L${(at * step).toFixed(1)} ${(height - (value / high) * (height - 2)).toFixed(1)}L${((at + 1) * step).toFixed(1)} ${(height - (value / high) * (height - 2)).toFixed(1)}`);
  return (
    <svg viewBox={`0 0 ${width} ${height}`} aria-hidden="true" preserveAspectRatio="none">
      <path d={`M0 ${height}${points.join("")}L${width} ${height}Z`} />
      {marks.map((at) => <line key={at} x1={at * step} x2={at * step} y1={0} y2={height} />)}
    </svg>
  );
}

function Chart({ overview, dark }: { overview: Overview; dark: boolean }) {
  const at = useRef<HTMLDivElement>(null);
  const { services, parts, part_ms, start_ms } = overview;
  const [data, names] = useMemo(() => {
    const x = Array.from({ length: parts + 1 }, (_, part) => (start_ms + part * part_ms) / 1e3);
    const top = services.slice(0, DRAWN), rest = services.slice(DRAWN);
    const lines = top.map(({ line }) => line);
    if (rest.length > 0) lines.push(Array.from({ length: parts }, (_, part) => rest.reduce((sum, { line }) => sum + line[part]!, 0)));
    let below = new Array<number>(parts + 1).fill(0);
    const columns = lines.map((line) => {
      // Cores that are busy on the mean.
      const column = below.map((value, part) => value + (line[Math.min(part, parts - 1)]! * 1e3) / part_ms);
      return (below = column);
    });
    const names = top.map(({ name }) => shown(name));
    if (rest.length > 0) names.push(`${rest.length + overview.more_services} others`);
    return [[x, ...columns.reverse()] as uPlot.AlignedData, names];
  }, [overview]);
  useLayoutEffect(() => {
    const ink = dark ? "#a8abb3" : "#5b6068", lines = { stroke: dark ? "#2c3038" : "#e4e6ea", width: 1 }, font = "11px system-ui, sans-serif";
    const colours = names.map((_, number) => (number < DRAWN ? COLOURS[number]! : COLOURS[DRAWN]!)).reverse();
    const made = new uPlot({
      width: at.current!.clientWidth || 900, height: HEIGHT, padding: [8, 12, 0, 0], legend: { show: false }, cursor: { show: false },
      tzDate: (seconds) => uPlot.tzDate(new Date(seconds * 1e3), "Etc/UTC"),
      scales: { y: { range: (_plot, _low, high) => [0, Math.max(high * 1.05, 1e-6)] } },
      axes: [{ stroke: ink, grid: lines, ticks: lines, font, size: 28, space: 70, values: (_plot, splits) => splits.map(moment) }, { stroke: ink, grid: lines, ticks: lines, font, size: 52, values: (_plot, splits) => splits.map((value) => String(value)) }],
      series: [{}, ...colours.map((fill) => ({ fill, stroke: fill, width: 0, points: { show: false }, paths: uPlot.paths.stepped!({ align: 1 }) }))],
    }, data, at.current!);
    const observer = new ResizeObserver(() => made.setSize({ width: at.current!.clientWidth, height: HEIGHT }));
    observer.observe(at.current!);
    return () => { observer.disconnect(); made.destroy(); };
  }, [data, dark]);
  return (
    <section class="chart" aria-label="CPU time over time">
      <h2>Busy cores by service</h2>
      <div class="legend">{names.map((name, number) => <span key={name}><i style={{ background: COLOURS[Math.min(number, DRAWN)] }} /> {name}</span>)}</div>
      <div id="time-line" ref={at} />
    </section>
  );
}

function Changes({ overview, search }: { overview: Overview; search: string }) {
  const of = overview.changes.filter(({ service }) => service.includes(search));
  const isChanged = ({ changes, whole }: ServiceChange) => whole[2] || changes.some(({ moved_to }) => moved_to === null);
  const changed = of.filter(isChanged), same = of.filter((change) => !isChanged(change));
  return (
    <section aria-label="changes" id="changes-of-versions">
      <h2>What changed with the newest versions</h2>
      {of.length === 0 && <p class="muted">No service has two versions: the label <code>service.version</code> tells them apart.</p>}
      {changed.map((change) => {
        const [before, after, significant] = change.whole;
        return (
          <div class="change" key={change.service}>
            <h3>{shown(change.service)} <span class="muted">{shown(change.old)} → {shown(change.new)}</span></h3>
            {significant && <p class={after > before ? "up" : "down"}>CPU time of a process-hour: {decimals(before, 1)} s → {decimals(after, 1)} s, {after > before ? "+" : ""}{percent(after / before - 1)}</p>}
            <table><tbody>
              {change.changes.map((line) => (
                <tr key={`${line.name}\n${line.file}`} class={line.moved_to === null ? "" : "muted"}>
                  <td class="number">{percent(line.before, 3)}</td><td class="number">{percent(line.after, 3)}</td>
                  <td class={`number ${line.moved_to !== null ? "" : line.after > line.before ? "up" : "down"}`}
                    title={line.interval ? `99 % interval: ${decimals(line.interval[0] * 100, 3)} to ${decimals(line.interval[1] * 100, 3)} points` : undefined}>
                    {line.before > 0 ? `${line.after > line.before ? "+" : ""}${percent(line.after / line.before - 1)}` : "new"}</td>
                  <td class="named"><code>{shown(line.name)}</code><small>{line.moved_to === null ? shown(line.file) : `only moved, renamed or split: now ${shown(line.moved_to)}`}</small></td>
                </tr>))}
            </tbody></table>
          </div>);
      })}
      {same.length > 0 && <p class="muted">Not changed, as far as can be seen: {same.map(({ service, old, new: now, visible }) =>
        `${shown(service)} (${shown(old)} → ${shown(now)}${visible === null ? ", too little to tell" : `, ${percent(visible)} of a function with 1 % would show`})`).join("; ")}</p>}
    </section>
  );
}

function Losses({ overview, search }: { overview: Overview; search: string }) {
  const rows = overview.losses.filter(({ host }) => host.includes(search));
  return (
    <section aria-label="losses" id="losses">
      <h2>Hosts that lose samples</h2>
      {rows.length === 0 ? <p class="muted">{overview.losses.length === 0 ? "None: nothing was lost." : "None of those that are searched for."}</p> : (
        <table>
          <thead><tr><th>Host</th><th class="number">Stored</th><th class="number">Lost</th><th class="number">Share</th><th class="number" title="segments of a killed agent, whose losses are unknown">Recovered</th></tr></thead>
          <tbody>{rows.map((row) => (
            <tr key={row.host}><td class="named"><code>{shown(row.host)}</code></td><td class="number">{whole(row.stored)}</td><td class="number">{whole(row.lost)}</td>
              <td class={`number ${row.lost_ppm > 10_000 ? "up" : ""}`}>{percent(row.lost_ppm / 1e6, 2)}</td><td class="number">{row.recovered || ""}</td></tr>))}</tbody>
        </table>)}
    </section>
  );
}

function App({ overview }: { overview: Overview }) {
  const [search, setSearch] = useState("");
  const [chosen, setChosen] = useState(0);
  const [dark, setDark] = useState(() => matchMedia("(prefers-color-scheme: dark)").matches);
  useEffect(() => { document.documentElement.dataset["theme"] = dark ? "dark" : "light"; }, [dark]);
  const all = overview.services.reduce((sum, { seconds }) => sum + seconds, 0);
  const services = overview.services.map((service, number) => ({ service, number }))
    .filter(({ service }) => search === "" || service.name.includes(search) || service.functions.some(({ name, file }) => name.includes(search) || file.includes(search)));
  const service = overview.services[services.some(({ number }) => number === chosen) ? chosen : (services[0]?.number ?? 0)];
  const first = overview.services[0], top = first?.functions[0];
  const marks = (of: ServiceLine) => of.versions.map(([, ms]) => (ms - overview.start_ms) / overview.part_ms).filter((at) => at > 0.5);
  const changed = overview.changes.filter(({ changes, whole }) => whole[2] || changes.some(({ moved_to }) => moved_to === null)).length;
  const share = overview.lost / Math.max(1, overview.stored + overview.lost);
  const end = overview.start_ms + overview.parts * overview.part_ms;
  return (
    <>
      <header class="top">
        <div class="title"><h1>The fleet</h1><p>{shown(overview.root)} · {date(overview.start_ms)} to {date(end)} UTC</p></div>
        <input type="search" placeholder="Service, function, host" aria-label="search" value={search} onInput={(event) => setSearch(event.currentTarget.value)} />
        <button id="theme" aria-label="dark or light" title="dark or light" onClick={() => setDark(!dark)}>{dark ? "☀" : "☾"}</button>
      </header>
      {first === undefined ? <p class="empty">There is no CPU time in these tables.</p> : (
        <p class="lead"><b>{shown(first.name)}</b> takes <b>{percent(first.seconds / all)}</b> of the fleet's CPU time{top && <>, above all in <code>{shown(top.name)}</code> ({percent(top.own / first.seconds)})</>}.</p>)}
      <p class="facts">
        <span>{whole(overview.hosts)} hosts</span><span>{whole(overview.services.length + overview.more_services)} services</span><span>{cpu(all)} of CPU time</span><span>{whole(overview.stored)} samples</span>
        {overview.changes.length > 0 && <a class={`chip ${changed > 0 ? "bad" : "good"}`} href="#changes-of-versions">{changed} of {overview.changes.length} new versions changed something</a>}
        <a class={`chip ${share > 0.01 ? "bad" : "good"}`} href="#losses">{percent(share, 2)} lost</a>
      </p>
      <Chart overview={overview} dark={dark} />
      <div class="pair">
        <section aria-label="services">
          <h2>Services</h2>
          <table id="services">
            <thead><tr><th>Service</th><th class="number">CPU time</th><th class="number">Share</th><th>Over time</th></tr></thead>
            <tbody>{services.map(({ service: of, number }) => (
              <tr key={of.name} class={of === service ? "selected" : ""}>
                <td class="named"><button class="link" onClick={() => setChosen(number)}>{shown(of.name)}</button><small>{of.versions.map(([version]) => shown(version)).reverse().join(" → ")}</small></td>
                <td class="number">{cpu(of.seconds)}</td><td class="number">{percent(of.seconds / all)}<span class="share-bar"><i style={{ width: `${(of.seconds / all) * 100}%` }} /></span></td>
                <td class="spark"><Spark line={of.line} marks={marks(of)} /></td>
              </tr>))}</tbody>
          </table>
          {overview.more_services > 0 && <p class="muted">and {whole(overview.more_services)} more with less</p>}
        </section>
        <section aria-label="functions">
          {service && <>
            <h2>{shown(service.name)}: top functions</h2>
            <table id="functions">
              <thead><tr><th class="number">Self</th><th class="number">Total</th><th>Function</th><th>Self over time</th></tr></thead>
              <tbody>{service.functions.filter(({ name, file }) => search === "" || service.name.includes(search) || name.includes(search) || file.includes(search)).map((line) => (
                <tr key={`${line.name}\n${line.file}`}>
                  <td class="number" title={cpu(line.own)}>{percent(line.own / service.seconds)}<span class="share-bar"><i style={{ width: `${(line.own / service.seconds) * 100}%` }} /></span></td>
                  <td class="number" title={cpu(line.total)}>{percent(line.total / service.seconds)}</td>
                  <td class="named"><code title={shown(line.name)}>{shown(line.name)}</code><small title={shown(line.file)}>{shown(line.file)}</small></td>
                  <td class="spark"><Spark line={line.line} marks={marks(service)} /></td>
                </tr>))}</tbody>
            </table>
          </>}
        </section>
      </div>
      <div class="pair below"><Changes overview={overview} search={search} /><Losses overview={overview} search={search} /></div>
      <footer>Written by tachyon-fleet. CPU time is what samples stand for; a broken line marks the first slice of a version.</footer>
    </>
  );
}

const text = document.getElementById("data")!.textContent!;
const bytes = Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
const overview = JSON.parse(new TextDecoder().decode(bytes)) as Overview;
const app = document.getElementById("app")!;
app.replaceChildren();
app.className = "fleet";
render(<App overview={overview} />, app);
