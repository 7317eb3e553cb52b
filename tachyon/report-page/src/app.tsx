// The page: one state, from which everything that is shown follows.

import { render } from "preact";
import { useCallback, useEffect, useLayoutEffect, useMemo, useRef, useState } from "preact/hooks";
import { ChangeDetails, ChangesTable, functionOf, Losses, Verdict } from "./changes";
import { KERNEL, load, NATIVE, PYTHON, unpack } from "./data";
import { Details } from "./details";
import { type Changes, type Difference, join, sides, weigh } from "./difference";
import { Filters } from "./filters";
import { type Colouring, kindColour, layOut, type Layout, neighbour, pathOf } from "./graph";
import { Graph } from "./graph_view";
import { Headline, Quality } from "./headline";
import { HotSpots } from "./hot_spots";
import { Model, type Sums } from "./model";
import { fromFragment, START, type State, toFragment, type View } from "./place";
import { markdown, Share } from "./share";
import { SourceView } from "./source";
import { STATE_COUNT } from "./states";
import { Threads } from "./threads";
import { TimeLine } from "./time_line";
import { count, finder, percent } from "./words";

const KEYS: [string, string][] = [
  ["/", "search"], ["arrows", "walk the graph, once it has the focus"], ["Enter", "zoom into the box, and show its function"],
  ["Escape, Backspace", "zoom out, then close the function"], ["1, 2, 3", "graph, source, threads"], ["f, i, v", "flame graph, icicle, inverted"],
  ["n", "native frames shown or folded"], ["c", "next colouring"], ["t", "light or dark"], ["a", "all samples: every filter off"], ["?", "these keys"],
];
const VIEWS: [View, string][] = [["graph", "Flame graph"], ["source", "Source"], ["threads", "Threads"]];
const LAYOUTS: [Layout, string, string][] = [
  ["icicle", "Icicle", "callers above"], ["flame", "Flame", "callers below"], ["inverted", "Inverted", "what ran first, its callers below it"]];
const COLOURINGS: [Colouring, string][] = [["kind", "language"], ["self", "self time"], ["total", "total time"], ["module", "module"]];

interface Told { title: string; caption: string }

function App({ model, difference, told }: { model: Model; difference: Difference | null; told: Told }) {
  const { document: data } = model.data;
  const limits = useMemo(() => ({
    functions: model.names.length, processes: data.processes.length, threads: data.threads.length,
    strings: data.strings.length, buckets: data.buckets, states: STATE_COUNT,
  }), [model]);
  const usual: Colouring = difference ? "change" : START.colouring;
  const colourings = difference ? [...COLOURINGS, ["change", "change"] as [Colouring, string]] : COLOURINGS;
  const [state, setState] = useState<State>(() => fromFragment(location.hash, usual, limits));
  const [current, setCurrent] = useState(-1);
  // Not known before the graph is there and has been measured.
  const [width, setWidth] = useState(0);
  const [wantsDark, setDark] = useState(() => matchMedia("(prefers-color-scheme: dark)").matches);
  const [printed, setPrinted] = useState(false);
  // Paper is light.
  const dark = wantsDark && !printed;
  const search = useRef<HTMLInputElement>(null);
  const keys = useRef<HTMLDialogElement>(null);
  const set = useCallback((change: Partial<State>) => setState((state) => ({ ...state, ...change })), []);

  useEffect(() => {
    const back = () => setState(fromFragment(location.hash, usual, limits));
    addEventListener("hashchange", back);
    return () => removeEventListener("hashchange", back);
  }, []);
  useEffect(() => {
    const later = setTimeout(() => {
      const fragment = toFragment(state, usual);
      if (fragment !== location.hash.slice(1)) history.replaceState(null, "", `#${fragment}`);
    }, 200);
    return () => clearTimeout(later);
  }, [state]);
  useLayoutEffect(() => { document.documentElement.dataset["theme"] = dark ? "dark" : "light"; }, [dark]);
  useEffect(() => {
    const media = matchMedia("print"), change = () => setPrinted(media.matches);
    media.addEventListener("change", change);
    return () => media.removeEventListener("change", change);
  }, []);

  const { process, thread, task, module, range, native } = state;
  const filter = useMemo(() => ({ process, thread, task, module, state: state.state, range }),
    [process, thread, task, module, state.state, range?.[0], range?.[1]]);
  const filtered = Object.values(filter).some((choice) => choice !== null);
  const sums: Sums = useMemo(() => (filtered ? model.sums(filter) : model.everything), [filter]);
  const calls = native ? model.shown : model.folded;
  const both = useMemo(() => difference && sides(model, filter, difference), [filter]);
  const weights = useMemo(() => (both ? weigh(model, both) : { samples: sums.total, grown: null }), [sums]);
  const rows = useMemo(() => model.rows(sums, native), [sums, native]);
  const zoom = state.zoom.join(".");
  const boxes = useMemo(() => {
    const boxes = layOut(model, calls, weights, sums.samples, state.layout === "inverted", state.zoom, width === 0 ? 1 : 0.5 / width);
    performance.mark("boxes", { detail: boxes.boxes.length });
    return boxes;
  }, [calls, weights, state.layout, zoom, width]);
  const found = useMemo(() => finder(model, state.search), [state.search]);
  const matched = useMemo(() => found && model.matching(sums, found), [found, sums]);
  const at = current >= 0 && current < boxes.boxes.length ? current : boxes.zoomed;

  const zoomTo = (index: number) => {
    const path = pathOf(boxes, index);
    setCurrent(path.length);
    set({ zoom: path, selected: path.length ? path[path.length - 1]! : state.selected });
  };
  const everything = () => set({ process: null, thread: null, task: null, module: null, state: null, range: null, zoom: [], search: "" });
  const key = (event: KeyboardEvent) => {
    if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
    const typing = event.target instanceof HTMLElement && event.target.matches("input:not([type=checkbox]), select, textarea");
    if (typing) {
      if (event.key === "Escape") (event.target as HTMLElement).blur();
      return;
    }
    const inGraph = event.target instanceof HTMLElement && event.target.id === "boxes";
    const up = state.layout === "flame" ? "in" : "out", down = state.layout === "flame" ? "out" : "in";
    const arrows: Record<string, "in" | "out" | "left" | "right"> = { ArrowUp: up, ArrowDown: down, ArrowLeft: "left", ArrowRight: "right" };
    const layouts: Record<string, Layout> = { f: "flame", i: "icicle", v: "inverted" };
    const view = difference ? undefined : VIEWS[Number(event.key) - 1];
    if (inGraph && arrows[event.key]) setCurrent(neighbour(boxes, at, arrows[event.key]!));
    else if (inGraph && event.key === "Enter") zoomTo(at);
    else if (event.key === "Escape" || event.key === "Backspace") {
      if (boxes.zoomed > 0) zoomTo(boxes.boxes[boxes.zoomed]!.parent);
      else set({ selected: null });
    } else if (layouts[event.key]) set({ layout: layouts[event.key]!, zoom: [], view: "graph" });
    else if (view) set({ view: view[0] });
    else if (event.key === "/") search.current?.focus();
    else if (event.key === "n") set({ native: !native, zoom: [] });
    else if (event.key === "c") set({ colouring: colourings[(colourings.findIndex(([name]) => name === state.colouring) + 1) % colourings.length]![0] });
    else if (event.key === "t") setDark(!wantsDark);
    else if (event.key === "a") everything();
    else if (event.key === "?") keys.current?.showModal();
    else return;
    event.preventDefault();
  };
  useEffect(() => {
    addEventListener("keydown", key);
    return () => removeEventListener("keydown", key);
  });

  const points = (share: number) => `${(Math.max(0, share) * 100).toFixed(2)} %`;
  /** What is told of a box. */
  const tell = (index: number): string => {
    const box = boxes.boxes[index]!, mean = box.total / Math.max(1, sums.samples);
    if (difference) return `before ${points(mean - box.grown / 2)}, after ${points(mean + box.grown / 2)} (${box.grown < 0 ? "−" : "+"}${(Math.abs(box.grown) * 100).toFixed(2)} points)`;
    const own = box.func < 0 || state.layout === "inverted" ? "" : `; self ${count(box.own)}, ${percent(box.own, sums.samples)}`;
    return `${count(box.total)} samples, ${percent(box.total, sums.samples)}${own}`;
  };
  const box = boxes.boxes[at]!;
  const status = box.func < 0 ? difference ? "all" : `all: ${tell(at)}`
    : `${model.names[box.func]}: ${tell(at)}${model.file(box.func) ? ` · ${model.file(box.func)}` : ""}`;
  const hasNative = useMemo(() => data.functions.kind.some((kind) => kind === NATIVE || kind === KERNEL), [model]);
  const view = difference ? "graph" : state.view;
  const select = (func: number | null) => set({ selected: func });
  const versions = [...new Set(data.processes.map(({ python }) => python).filter((python) => python))];
  const when = data.start_unix > 0 ? `${new Date(data.start_unix * 1000).toISOString().slice(0, 16).replace("T", " ")} UTC` : "";
  return (
    <>
      <header class="top">
        <div class="title">
          <h1>{told.title}</h1>
          <p><span id="caption">{told.caption}</span>
            {[versions.length > 0 && `CPython ${versions.slice(0, 3).join(", ")}`, data.host, when].filter(Boolean).map((text) => <span key={text as string}>{text}</span>)}</p>
        </div>
        {(filtered || state.zoom.length > 0 || state.search) && <button id="all" title="every filter off (a)" onClick={everything}>Reset</button>}
        <Filters model={model} state={state} set={set} threadsToo={!difference} />
        <output id="matched">{matched === null ? "" : `matched ${percent(matched, sums.samples)}`}</output>
        <input ref={search} type="search" placeholder="Search ( / )" aria-label="search functions and files" value={state.search}
          onInput={(event) => set({ search: event.currentTarget.value })} />
        {!difference && <Share text={() => markdown(model, sums, rows, filtered, told.title)} />}
        <button id="theme" onClick={() => setDark(!wantsDark)} aria-label="light or dark" title="light or dark (t)">{dark ? "☀" : "☾"}</button>
        <button id="keys" onClick={() => keys.current?.showModal()} title="keys" aria-label="keys">?</button>
      </header>
      <div class="summary">
        {difference ? <Verdict difference={difference} select={(change) => select(functionOf(model, change))} />
          : <Headline model={model} sums={sums} rows={rows} filtered={filtered} select={select} />}
        {difference ? <Losses difference={difference} /> : <Quality model={model} />}
      </div>
      {!difference && <TimeLine model={model} sums={sums} range={range} state={state.state} dark={dark} set={set} />}
      <main class={difference ? "comparison" : ""}>
        <div class="left">
          <div class="toolbar" role="toolbar" aria-label="what is shown">
            {!difference && <span class="tabs" role="tablist">{VIEWS.map(([name, word], place) => (
              <button key={name} id={`show-${name}`} role="tab" aria-selected={view === name} title={`key ${place + 1}`} onClick={() => set({ view: name })}>{
                name === "threads" && model.tasks.length > 0 ? "Threads and tasks" : word}</button>))}</span>}
            {view === "graph" && <>
              <span class="group" role="group" aria-label="layout">
                {LAYOUTS.map(([layout, word, title]) => (
                  <button key={layout} id={`layout-${layout}`} title={title} aria-pressed={state.layout === layout}
                    onClick={() => set({ layout, zoom: [] })}>{word}</button>))}
              </span>
              {hasNative && <label title="without them, native code is a part of the Python function that called it"><input id="native" type="checkbox" checked={native}
                onChange={() => set({ native: !native, zoom: [] })} /> native</label>}
              <label title="what the colours tell">by <select id="colouring" aria-label="colours" value={state.colouring}
                onChange={(event) => set({ colouring: event.currentTarget.value as Colouring })}>
                {colourings.map(([name, word]) => <option key={name} value={name}>{word}</option>)}
              </select></label>
              <Legend colouring={state.colouring} native={hasNative && native} dark={dark} />
            </>}
          </div>
          {view === "graph" && <Graph model={model} all={difference ? "all: the mean of before and after" : `all: ${count(sums.samples)} samples`} boxes={boxes}
            layout={state.layout} colouring={state.colouring} found={found} selected={state.selected} current={current} dark={dark} tell={tell}
            setCurrent={setCurrent} setWidth={setWidth} zoomTo={zoomTo} />}
          {view === "source" && <SourceView model={model} rows={rows} sums={sums} state={state} set={set} />}
          {view === "threads" && <Threads model={model} sums={sums} state={state} dark={dark} set={set} />}
          {state.selected !== null && (difference && both
            ? <ChangeDetails model={model} calls={calls} sides={both} difference={difference} func={state.selected} set={set} />
            : <Details model={model} calls={calls} sums={sums} rows={rows} func={state.selected} set={set} />)}
        </div>
        <aside>
          {difference ? <ChangesTable model={model} difference={difference} search={state.search} selected={state.selected} set={set} />
            : <HotSpots model={model} rows={rows} sums={sums} found={found} state={state} hasNative={hasNative} set={set} />}
        </aside>
      </main>
      <footer id="status" aria-live="polite">{status}</footer>
      <dialog ref={keys} aria-label="keys">
        <table><tbody>{KEYS.map(([key, what]) => <tr key={key}><th><kbd>{key}</kbd></th><td>{what}</td></tr>)}</tbody></table>
        <form method="dialog"><button>Close</button></form>
      </dialog>
    </>
  );
}

/** What the graph's colours say. */
function Legend({ colouring, native, dark }: { colouring: Colouring; native: boolean; dark: boolean }) {
  if (colouring === "kind") return <span class="legend">
    <span><i style={{ background: kindColour(PYTHON, dark, 5) }} /> Python</span>{native && <span><i style={{ background: kindColour(NATIVE, dark, 5) }} /> native</span>}
  </span>;
  if (colouring === "self" || colouring === "total") return <span class="legend"><span class={`ramp ${dark ? "dark" : ""}`} aria-hidden /> little to much</span>;
  return colouring === "change" ? <span class="legend" id="legend">
    <span><i style={{ background: "hsl(8 85% 58%)" }} /> larger share after</span><span><i style={{ background: "hsl(210 85% 58%)" }} /> smaller</span>
  </span> : null;
}

async function read(): Promise<[Model, Difference | null]> {
  const texts = ["data", "difference"].map((id) => {
    const element = document.getElementById(id)!, text = element.textContent!;
    element.remove();
    return text;
  });
  const data = await load(texts[0]!);
  performance.mark("decoded");
  // The side before, and what the statistics say.
  const [before, changes] = texts[1]!.trim().split(" ");
  if (!before || !changes) return [new Model(data), null];
  const told = JSON.parse(new TextDecoder().decode(await unpack(changes))) as Changes;
  const joined = join(await load(before), data, told);
  return [new Model(joined.data), joined.difference];
}

const app = document.getElementById("app")!;
const text = (selector: string) => document.querySelector(selector)?.textContent ?? "";
const told = { title: text("h1"), caption: text("#caption") };
performance.mark("begun");
read().then(([model, difference]) => {
  performance.mark("model");
  app.textContent = "";
  render(<App model={model} difference={difference} told={told} />, app);
  performance.mark("shown");
}, (error: unknown) => {
  app.textContent = `this report cannot be read: ${error}`;
});
