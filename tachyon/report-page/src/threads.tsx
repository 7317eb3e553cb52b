// Processes, threads and tasks: what each did, and when.

import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { Bar, type Set, Share } from "./hot_spots";
import type { Model, Sums } from "./model";
import type { State } from "./place";
import { STATES, waiting } from "./states";
import { count, percent, seconds } from "./words";

/** Most threads of a process, and processes, until more are asked for. */
const THREADS = 24, PROCESSES = 12;

interface Lane { times: Float64Array[]; states: Float64Array; samples: number }

function summedUp(times: Float64Array[]): Lane {
  const states = Float64Array.from(times, (column) => column.reduce((a, b) => a + b, 0));
  return { times, states, samples: states.reduce((a, b) => a + b, 0) };
}

export function Threads({ model, sums, state, dark, set }: { model: Model; sums: Sums; state: State; dark: boolean; set: Set }) {
  const { threads, processes } = model.data.document;
  const [most, setMost] = useState(PROCESSES);
  const groups = useMemo(() => {
    const by = model.byThread();
    const groups = processes.map((_, process) => {
      const own = threads.flatMap((thread, index) => (thread.process === process && by[index]! > 0 ? [index] : []));
      return { process, threads: own.sort((a, b) => by[b]! - by[a]! || a - b), samples: own.reduce((sum, index) => sum + by[index]!, 0) };
    });
    return groups.filter((group) => group.samples > 0).sort((a, b) => b.samples - a.samples);
  }, [model]);
  return (
    <div class="scrolled threads" id="lanes">
      {groups.slice(0, most).map(({ process, threads }) => <Group key={process} {...{ model, process, members: threads, state, dark, set }} />)}
      {groups.length > most && <button class="more-rows" onClick={() => setMost(most + 5 * PROCESSES)}>{count(groups.length - most)} more processes</button>}
      {model.tasks.length > 0 && <Tasks model={model} sums={sums} state={state} set={set} />}
    </div>
  );
}

/** A process with its threads. */
function Group({ model, process, members, state, dark, set }: {
  model: Model; process: number; members: number[]; state: State; dark: boolean; set: Set;
}) {
  const { threads, processes } = model.data.document;
  const [most, setMost] = useState(THREADS);
  const shown = members.slice(0, most);
  const [whole, ...lanes] = useMemo(() => {
    const of = new Int32Array(threads.length).fill(-1), all = new Int32Array(threads.length).fill(-1);
    shown.forEach((thread, place) => { of[thread] = place; });
    members.forEach((thread) => { all[thread] = 0; });
    return [model.lanes(all, 1)[0]!, ...model.lanes(of, shown.length)].map(summedUp);
  }, [model, shown.join()]);
  const { name, python } = processes[process]!;
  const row = (lane: Lane, key: string, text: string, title: string, isProcess: boolean, chosen: boolean, choose: () => void) => (
    <div key={key} class={`lane ${isProcess ? "process" : ""} ${chosen ? "selected" : ""}`}>
      <button class="link" title={title} aria-pressed={chosen} onClick={choose}>{text}</button>
      <Picture model={model} lane={lane} most={isProcess ? members.length : 1} range={state.range} dark={dark} />
      <Figures model={model} lane={lane} />
    </div>
  );
  return (
    <>
      {row(whole!, "process", name, python ? `${name}, CPython ${python}` : name, true, state.process === process,
        () => set({ process: state.process === process ? null : process, thread: null }))}
      {shown.map((thread, place) => row(lanes[place]!, String(thread), threads[thread]!.name, threads[thread]!.name, false, state.thread === thread,
        () => set({ thread: state.thread === thread ? null : thread, process: null })))}
      {members.length > most && <button class="more-rows" onClick={() => setMost(most + 10 * THREADS)}>{count(members.length - most)} more threads</button>}
    </>
  );
}

/** Time on a CPU, the GIL's share of it, and waiting. */
function Figures({ model, lane }: { model: Model; lane: Lane }) {
  const { interval_us } = model.data.document;
  const waits = waiting(lane.states), known = lane.states[1]! + lane.states[2]!;
  const causes = STATES.filter(({ id, waits }) => waits && lane.states[id]! > 0)
    .map(({ id, word }) => `${word} ${percent(lane.states[id]!, lane.samples)}`).join(", ");
  return (
    <span class="figures">
      <span title="time on a CPU">{seconds(((lane.samples - waits) * interval_us) / 1e6)}</span>
      <span title="share of that in which it held the GIL">{known > 0 ? `GIL ${percent(lane.states[1]!, known)}` : ""}</span>
      <span title={causes}>{waits > 0 ? `waits ${percent(waits, lane.samples)}` : ""}</span>
    </span>
  );
}

/** Most pieces of time that are drawn. */
const DRAWN = 240;

/** `most`: threads that can be there at a time. */
function Picture({ model, lane, most, range, dark }: { model: Model; lane: Lane; most: number; range: State["range"]; dark: boolean }) {
  const canvas = useRef<HTMLCanvasElement>(null);
  const { bucket_us, interval_us, buckets } = model.data.document;
  useEffect(() => {
    const drawing = canvas.current!, context = drawing.getContext("2d")!, ratio = devicePixelRatio || 1;
    const across = (drawing.width = Math.max(1, Math.round(drawing.clientWidth * ratio)));
    const up = (drawing.height = Math.max(1, Math.round(drawing.clientHeight * ratio)));
    const joined = Math.max(1, Math.ceil(buckets / DRAWN)), wide = (across * joined) / buckets;
    const sum = (column: Float64Array, bin: number) => {
      let sum = 0;
      for (let bucket = bin * joined; bucket < Math.min(buckets, (bin + 1) * joined); bucket++) sum += column[bucket]!;
      return sum;
    };
    const bins = Math.ceil(buckets / joined);
    const sums = Array.from({ length: bins }, (_, bin) => lane.times.reduce((all, column) => all + sum(column, bin), 0));
    // A thread has no more than the time that there is; of many the height is what they had at most.
    const each = (joined * bucket_us) / interval_us;
    const full = Math.min(most * each, Math.max(each, ...sums));
    sums.forEach((all, bin) => {
      if (all === 0) return;
      const first = bin * joined;
      context.globalAlpha = !range || (first + joined > range[0] && first < range[1]) ? 1 : 0.2;
      let from = up;
      for (const { id, colour } of STATES) {
        const many = sum(lane.times[id]!, bin);
        if (many === 0) continue;
        const high = (many / Math.max(full, all)) * up;
        context.fillStyle = colour;
        context.fillRect(bin * wide, from - high, Math.max(1, wide), high);
        from -= high;
      }
    });
  }, [lane, most, range?.[0], range?.[1], dark]);
  return <canvas ref={canvas} aria-hidden />;
}

function Tasks({ model, sums, state, set }: { model: Model; sums: Sums; state: State; set: Set }) {
  const rows = useMemo(() => model.taskRows(sums), [model, sums]);
  const [most, setMost] = useState(THREADS);
  return (
    <>
      <table id="tasks">
        <thead><tr><th scope="col" title="in the task itself">Self</th><th scope="col" title="in the task and in those that it awaits">Total</th><th scope="col">Task</th></tr></thead>
        <tbody>{rows.slice(0, most).map((row) => (
          <tr key={row.func} class={state.task === row.func ? "selected" : ""} data-name={model.task(row.func)}
            onClick={() => set({ task: state.task === row.func ? null : row.func, zoom: [] })}>
            <Share part={row.own} whole={sums.samples} what="own" /><Share part={row.total} whole={sums.samples} what="total" />
            <td class="name"><button class="link" aria-pressed={state.task === row.func}>{model.task(row.func)}</button>
              <Bar own={row.own} total={row.total} waiting={row.waiting} whole={sums.samples} /></td>
          </tr>))}</tbody>
      </table>
      {rows.length > most && <button class="more-rows" onClick={() => setMost(most + 10 * THREADS)}>{count(rows.length - most)} more tasks</button>}
    </>
  );
}
