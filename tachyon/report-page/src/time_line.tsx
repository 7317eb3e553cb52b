// What threads did over time, in which a range can be brushed; its legend tells the states apart and chooses one.

import { useLayoutEffect, useMemo, useRef } from "preact/hooks";
import uPlot from "uplot";
import type { Model, Sums } from "./model";
import type { Set } from "./hot_spots";
import { type State, STATES, stateOf } from "./states";
import { count, percent, seconds } from "./words";

type Range = [number, number] | null;
/** Most pieces that are drawn: fewer than there are, so that each has samples enough. */
const DRAWN = 240;
const HEIGHT = 88;

export function TimeLine({ model, sums, range, state, dark, set }: {
  model: Model; sums: Sums; range: Range; state: number | null; dark: boolean; set: Set;
}) {
  const { buckets, bucket_us, interval_us, quality } = model.data.document;
  const at = useRef<HTMLDivElement>(null);
  const plot = useRef<uPlot | null>(null);
  const joined = Math.max(1, Math.ceil(buckets / DRAWN));
  const second = bucket_us / 1e6;
  // Of chosen events there is no time that they stand for.
  const isTime = ["", "cpu-clock", "cycles"].includes(quality.event);
  const everything = model.everything;
  const used = useMemo(() => STATES.filter(({ id }) => everything.times[id]!.some((many) => many > 0)).map(({ id }) => id).join() || "0", [model]);
  const data = useMemo(() => {
    const bins = Math.ceil(buckets / joined);
    const x = Array.from({ length: bins + 1 }, (_, bin) => Math.min(buckets, bin * joined) * second);
    let below = new Float64Array(bins + 1);
    const columns = used.split(",").map((id) => {
      const column = Float64Array.from(below);
      sums.times[Number(id)]!.forEach((many, bucket) => {
        const bin = Math.floor(bucket / joined);
        column[bin]! += (many * (isTime ? interval_us : 1e6)) / ((x[bin + 1]! - x[bin]!) * 1e6);
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
  const select = (range: Range) => set({ range });
  const chosen = useRef(select);
  chosen.current = select;
  const show = () => {
    if (!plot.current) return;
    const [left, right] = range ? range.map((bucket) => plot.current!.valToPos(bucket * second, "x")) : [0, 0];
    plot.current.setSelect({ left: left!, width: right! - left!, top: 0, height: plot.current.bbox.height / devicePixelRatio }, false);
  };
  useLayoutEffect(() => {
    const ink = dark ? "#a8abb3" : "#5b6068", lines = { stroke: dark ? "#2c3038" : "#e4e6ea", width: 1 };
    const series = used.split(",").map((id) => stateOf(Number(id))).reverse();
    const font = "11px system-ui, sans-serif";
    const made = new uPlot({
      width: at.current!.clientWidth || 800, height: HEIGHT, padding: [6, 10, 0, 0], legend: { show: false },
      cursor: { y: false, points: { show: false }, drag: { x: true, y: false, setScale: false } },
      scales: { x: { time: false }, y: { range: (_plot, _low, high) => [0, Math.max(isTime ? 1 : 0, Math.ceil(high * 10) / 10)] } },
      axes: [
        { stroke: ink, grid: lines, ticks: lines, size: 26, font, space: 70, values: (_plot, splits) => splits.map((value) => `${value} s`) },
        { stroke: ink, grid: lines, ticks: lines, size: 40, font, space: 22, values: (_plot, splits) => splits.map((value) => `${value}`) },
      ],
      series: [{}, ...series.map(({ word, colour }) => ({ label: word, fill: colour, stroke: colour, width: 0, points: { show: false }, paths: uPlot.paths.stepped!({ align: 1 }) }))],
      hooks: {
        setSelect: [(plot) => {
          const { left, width } = plot.select;
          chosen.current(width < 2 ? null : snap(plot.posToVal(left, "x"), plot.posToVal(left + width, "x")));
        }],
      },
    }, data, at.current!);
    plot.current = made;
    made.over.addEventListener("dblclick", () => chosen.current(null));
    const observer = new ResizeObserver(() => { made.setSize({ width: at.current!.clientWidth, height: HEIGHT }); });
    observer.observe(at.current!);
    return () => { observer.disconnect(); made.destroy(); plot.current = null; };
  }, [used, dark]);
  useLayoutEffect(() => { plot.current?.setData(data); show(); }, [data]);
  useLayoutEffect(show);
  const edge = (text: string, otherwise: number) => (text === "" || !Number.isFinite(Number(text)) ? otherwise : Number(text));
  const [from, to] = range ?? [0, buckets];
  const all = sums.times.map((column) => column.slice(from, to).reduce((a, b) => a + b, 0));
  const sum = all.reduce((a, b) => a + b, 0);
  const legend = ({ id, word, short, colour }: State) => (
    <button key={id} class="state" aria-pressed={state === id} title={`${word}: ${count(all[id]!)} samples; a click shows only these`} data-state={id}
      onClick={() => set({ state: state === id ? null : id })}><i style={{ background: colour }} /> {short} <b>{percent(all[id]!, sum)}</b></button>);
  const decimal = (number: number) => +number.toFixed(3);
  return (
    <section class="time" aria-label="time line">
      <div class="legend">
        {isTime ? [false, true].map((waits) => {
          const members = used.split(",").map((text) => stateOf(Number(text))).filter((state) => state.waits === waits);
          return members.length > 0 && <span key={String(waits)} class="states" role="group" aria-label={waits ? "waiting for" : "running"}>
            <b>{waits ? "waiting" : "running"}</b>{members.map(legend)}</span>;
        }) : <b>samples each second</b>}
        <span class="brush">
          {!range && <span class="hint">drag to choose a time </span>}
          <input id="from" type="number" min={0} step="any" aria-label="from second" value={decimal(from * second)}
            onChange={(event) => select(snap(edge(event.currentTarget.value, 0), to * second))} /> to <input id="to" type="number" min={0}
            step="any" aria-label="to second" value={decimal(to * second)}
            onChange={(event) => select(snap(from * second, edge(event.currentTarget.value, buckets * second)))} /> s
          {range && <button id="whole-time" title={`back to all ${seconds(buckets * second)}`} onClick={() => select(null)}>all time</button>}</span>
      </div>
      <div id="time-line" ref={at} />
    </section>
  );
}
