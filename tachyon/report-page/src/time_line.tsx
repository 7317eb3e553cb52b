// CPU over time, in which a range can be brushed; and a lane for each thread.

import { useEffect, useLayoutEffect, useMemo, useRef, useState } from "preact/hooks";
import uPlot from "uplot";
import { HELD, NOT_HELD, RAN, WAITED } from "./data";
import type { Model, Sums } from "./model";
import { count, percent } from "./words";

type Range = [number, number] | null;
/** Most pieces that are drawn: fewer than there are, so that each has samples enough. */
const DRAWN = 240;
// From the bottom up.
const STATES: [number, string, string][] = [
  [HELD, "held the GIL", "#0072b2"], [NOT_HELD, "ran without it", "#56b4e9"], [RAN, "ran", "#009e73"], [WAITED, "waited", "#b0b0b0"],
];

export function TimeLine({ model, sums, range, dark, lanes, select }: {
  model: Model; sums: Sums; range: Range; dark: boolean; lanes: boolean; select(range: Range): void;
}) {
  const { buckets, bucket_us, interval_us } = model.data.document;
  const at = useRef<HTMLDivElement>(null);
  const plot = useRef<uPlot | null>(null);
  const joined = Math.max(1, Math.ceil(buckets / DRAWN));
  const second = bucket_us / 1e6;
  const states = STATES.filter(([state]) => sums.times[state]!.some((many) => many > 0));
  const used = (states.length ? states : STATES.slice(0, 1)).map(([state]) => state).join();
  const data = useMemo(() => {
    const bins = Math.ceil(buckets / joined);
    const x = Array.from({ length: bins + 1 }, (_, bin) => Math.min(buckets, bin * joined) * second);
    let below = new Float64Array(bins + 1);
    const columns = used.split(",").map((state) => {
      const column = Float64Array.from(below);
      sums.times[Number(state)]!.forEach((many, bucket) => {
        const bin = Math.floor(bucket / joined);
        column[bin]! += (many * interval_us) / ((x[bin + 1]! - x[bin]!) * 1e6);
      });
      column[bins] = column[bins - 1]!;
      return (below = column);
    });
    return [x, ...columns.reverse().map((column) => [...column])] as uPlot.AlignedData;
  }, [sums, used]);
  const snap = (from: number, to: number): Range => {
    const step = joined * second;
    const first = Math.max(0, Math.floor(from / step + 1e-9) * joined), last = Math.min(buckets, Math.ceil(to / step - 1e-9) * joined);
    return first < last ? [first, last] : null;
  };
  const chosen = useRef(select);
  chosen.current = select;
  const show = () => {
    if (!plot.current) return;
    const [left, right] = range ? range.map((bucket) => plot.current!.valToPos(bucket * second, "x")) : [0, 0];
    plot.current.setSelect({ left: left!, width: right! - left!, top: 0, height: plot.current.bbox.height / devicePixelRatio }, false);
  };
  useLayoutEffect(() => {
    const ink = dark ? "#bbb" : "#444", lines = { stroke: dark ? "#333" : "#ddd", width: 1 };
    const series = used.split(",").map((state) => STATES.find(([number]) => number === Number(state))!).reverse();
    const made = new uPlot({
      // Above the lanes, which have names to their left and numbers to their right.
      width: at.current!.clientWidth || 800, height: 96, padding: [8, lanes ? 158 : 8, 0, 0], legend: { show: false },
      cursor: { y: false, points: { show: false }, drag: { x: true, y: false, setScale: false } },
      scales: { x: { time: false }, y: { range: (_plot, _low, high) => [0, Math.max(1, Math.ceil(high * 10) / 10)] } },
      axes: [
        { stroke: ink, grid: lines, ticks: lines, size: 24, values: (_plot, splits) => splits.map((value) => `${value} s`) },
        { stroke: ink, grid: lines, ticks: lines, size: lanes ? 228 : 44, space: 24, values: (_plot, splits) => splits.map((value) => `${value}`) },
      ],
      series: [{}, ...series.map(([, label, fill]) => ({ label, fill, stroke: fill, width: 0, points: { show: false }, paths: uPlot.paths.stepped!({ align: 1 }) }))],
      hooks: {
        setSelect: [(plot) => {
          const { left, width } = plot.select;
          chosen.current(width < 2 ? null : snap(plot.posToVal(left, "x"), plot.posToVal(left + width, "x")));
        }],
      },
    }, data, at.current!);
    plot.current = made;
    made.over.addEventListener("dblclick", () => chosen.current(null));
    const observer = new ResizeObserver(() => { made.setSize({ width: at.current!.clientWidth, height: 96 }); });
    observer.observe(at.current!);
    return () => { observer.disconnect(); made.destroy(); plot.current = null; };
  }, [used, dark, lanes]);
  useLayoutEffect(() => { plot.current?.setData(data); show(); }, [data]);
  useLayoutEffect(show);
  const edge = (text: string, otherwise: number) => (text === "" || !Number.isFinite(Number(text)) ? otherwise : Number(text));
  const [from, to] = range ?? [0, buckets];
  const all = sums.times.map((column) => column.slice(from, to).reduce((a, b) => a + b, 0));
  return (
    <div>
      <p class="legend">
        <b>threads</b>
        {states.map(([state, word, colour]) => (
          <span key={state}><i style={{ background: colour }} /> {word} {percent(all[state]!, all.reduce((a, b) => a + b, 0))}</span>))}
        <span class="brush">from <input id="from" type="number" min={0} step="any" aria-label="from second" value={+(from * second).toFixed(3)}
          onChange={(event) => select(snap(edge(event.currentTarget.value, 0), to * second))} /> to <input id="to" type="number" min={0}
          step="any" aria-label="to second" value={+(to * second).toFixed(3)}
          onChange={(event) => select(snap(from * second, edge(event.currentTarget.value, buckets * second)))} /> s
          <button id="whole-time" disabled={!range} onClick={() => select(null)}>all time</button></span>
      </p>
      <div id="time-line" ref={at} />
    </div>
  );
}

/** Most lanes until more are asked for. */
const LANES = 8;

export function Lanes({ model, thread, process, range, dark, select }: {
  model: Model; thread: number | null; process: number | null; range: Range; dark: boolean; select(thread: number | null): void;
}) {
  const { threads, processes } = model.data.document;
  const [most, setMost] = useState(LANES);
  const order = useMemo(() => {
    const by = model.byThread();
    return threads.map((_, index) => index).filter((index) => by[index]! > 0).sort((a, b) => by[b]! - by[a]! || a - b);
  }, [model]);
  const all = process === null ? order : order.filter((index) => threads[index]!.process === process);
  const shown = all.slice(0, most);
  const lanes = useMemo(() => model.lanes(shown), [shown.join()]);
  if (order.length < 2) return null;
  return (
    <div class="lanes" id="lanes">
      {shown.map((index) => {
        const lane = lanes.get(index)!;
        const name = processes.length > 1 ? `${processes[threads[index]!.process]!.name}: ${threads[index]!.name}` : threads[index]!.name;
        return (
          <div key={index} class={thread === index ? "lane selected" : "lane"}>
            <button class="link" title={name} aria-pressed={thread === index} onClick={() => select(thread === index ? null : index)}>{name}</button>
            <Lane counts={lane.count} range={range} dark={dark} full={model.data.document.bucket_us / model.data.document.interval_us} />
            <span>{count(lane.total)}{lane.known > 0 && `, GIL ${percent(lane.held, lane.known)}`}</span>
          </div>
        );
      })}
      {all.length > most && <button onClick={() => setMost(most + 10 * LANES)}>{count(all.length - most)} more threads</button>}
    </div>
  );
}

function Lane({ counts, range, dark, full }: { counts: Float64Array; range: Range; dark: boolean; full: number }) {
  const canvas = useRef<HTMLCanvasElement>(null);
  useEffect(() => {
    const drawing = canvas.current!, context = drawing.getContext("2d")!;
    const across = (drawing.width = Math.max(1, drawing.clientWidth)), up = (drawing.height = 14), wide = across / counts.length;
    counts.forEach((many, bucket) => {
      if (many === 0) return;
      const inside = !range || (bucket >= range[0] && bucket < range[1]);
      context.globalAlpha = inside ? 0.25 + 0.75 * Math.min(1, many / full) : 0.12;
      context.fillStyle = dark ? "#56b4e9" : "#0072b2";
      context.fillRect(bucket * wide, 0, Math.max(1, wide), up);
    });
  });
  return <canvas ref={canvas} aria-hidden />;
}
