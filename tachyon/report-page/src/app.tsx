// The page: one state, from which everything that is shown follows.

import { render } from "preact";
import { useCallback, useEffect, useMemo, useRef, useState } from "preact/hooks";
import { ChangesTable, Verdict } from "./changes";
import { load, unpack } from "./data";
import { type Changes, type Difference, join, sides, weigh } from "./difference";
import { layOut, neighbour, pathOf, type Colouring, type Layout } from "./graph";
import { Details, Functions } from "./functions";
import { Graph } from "./graph_view";
import { Model, type Sums } from "./model";
import { fromFragment, START, type State, toFragment } from "./place";
import { Quality } from "./quality";
import { Lanes, TimeLine } from "./time_line";
import { count, finder, percent } from "./words";

const KEYS: [string, string][] = [
  ["/", "search"], ["arrows", "walk the graph, once it has the focus"], ["Enter", "zoom into the box, and show its function"],
  ["Escape, Backspace", "zoom out"], ["f, i, v", "flame graph, icicle, inverted"], ["n", "native frames shown or folded"],
  ["c", "next colouring"], ["t", "light or dark"], ["a", "all time, processes, threads and modules"], ["?", "these keys"],
];

function App({ model, difference }: { model: Model; difference: Difference | null }) {
  const { document: told } = model.data;
  const limits = useMemo(() => ({
    functions: model.names.length, processes: told.processes.length, threads: told.threads.length,
    strings: told.strings.length, buckets: told.buckets,
  }), [model]);
  const usual: Colouring = difference ? "change" : START.colouring;
  const [state, setState] = useState<State>(() => fromFragment(location.hash, usual, limits));
  const [current, setCurrent] = useState(-1);
  const [width, setWidth] = useState(800);
  const [dark, setDark] = useState(() => matchMedia("(prefers-color-scheme: dark)").matches);
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
  useEffect(() => { document.documentElement.dataset["theme"] = dark ? "dark" : "light"; }, [dark]);

  const { process, thread, module, range, native } = state;
  const sums: Sums = useMemo(() => model.sums({ process, thread, module, range }), [process, thread, module, range?.[0], range?.[1]]);
  const tree = native ? model.shown : model.folded;
  const both = useMemo(() => difference && sides(model, { process, thread, module, range }, difference), [sums]);
  const weights = useMemo(() => (both ? weigh(model, tree, both) : model.nodes(tree, sums)), [tree, sums]);
  const rows = useMemo(() => model.rows(sums, native), [sums, native]);
  const zoom = state.zoom.join(".");
  const boxes = useMemo(
    () => layOut(tree, weights, sums.samples, state.layout === "inverted", state.zoom, 0.5 / Math.max(1, width)),
    [tree, weights, state.layout, zoom, width]);
  const found = useMemo(() => finder(model, state.search), [state.search]);
  const matched = useMemo(() => found && model.matching(sums, found), [found, sums]);
  const at = current >= 0 && current < boxes.boxes.length ? current : boxes.zoomed;

  const zoomTo = (index: number) => {
    const path = pathOf(boxes, index);
    setCurrent(path.length);
    set({ zoom: path, selected: path.length ? path[path.length - 1]! : state.selected });
  };
  const key = (event: KeyboardEvent) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const typing = event.target instanceof HTMLElement && event.target.matches("input, select");
    if (typing) {
      if (event.key === "Escape") (event.target as HTMLElement).blur();
      return;
    }
    const inGraph = event.target instanceof HTMLElement && event.target.id === "boxes";
    const up = state.layout === "flame" ? "in" : "out", down = state.layout === "flame" ? "out" : "in";
    const arrows: Record<string, "in" | "out" | "left" | "right"> = { ArrowUp: up, ArrowDown: down, ArrowLeft: "left", ArrowRight: "right" };
    const layouts: Record<string, Layout> = { f: "flame", i: "icicle", v: "inverted" };
    const colourings: Record<Colouring, Colouring> = { kind: "self", self: "module", module: difference ? "change" : "kind", change: "kind" };
    if (inGraph && arrows[event.key]) setCurrent(neighbour(boxes, at, arrows[event.key]!));
    else if (inGraph && event.key === "Enter") zoomTo(at);
    else if (event.key === "Escape" || event.key === "Backspace") zoomTo(boxes.boxes[boxes.zoomed]!.parent);
    else if (layouts[event.key]) set({ layout: layouts[event.key]!, zoom: [] });
    else if (event.key === "/") search.current?.focus();
    else if (event.key === "n") set({ native: !native, zoom: [] });
    else if (event.key === "c") set({ colouring: colourings[state.colouring] });
    else if (event.key === "t") setDark(!dark);
    else if (event.key === "a") set({ process: null, thread: null, module: null, range: null, zoom: [] });
    else if (event.key === "?") keys.current?.showModal();
    else return;
    event.preventDefault();
  };
  useEffect(() => {
    addEventListener("keydown", key);
    return () => removeEventListener("keydown", key);
  });

  const box = boxes.boxes[at]!;
  const name = box.func < 0 ? "all" : model.names[box.func]!;
  const mean = box.total / Math.max(1, sums.samples), points = (share: number) => `${(Math.max(0, share) * 100).toFixed(2)} %`;
  const status = difference ? box.func < 0 ? "all" : `${name}: before ${points(mean - box.grown / 2)}, after ${points(mean + box.grown / 2)}` +
    ` (${box.grown < 0 ? "−" : "+"}${(Math.abs(box.grown) * 100).toFixed(2)} points)${model.file(box.func) ? ` · ${model.file(box.func)}` : ""}` : `${name}: ${count(box.total)} samples, ${percent(box.total, sums.samples)}` +
    (box.func < 0 || state.layout === "inverted" ? "" : `; self ${count(box.own)}, ${percent(box.own, sums.samples)}`) +
    (box.func >= 0 && model.file(box.func) ? ` · ${model.file(box.func)}` : "");
  const filtered = process !== null || thread !== null || module !== null || range !== null;
  const buttons: [Layout, string, string][] = [
    ["flame", "Flame", "callers below"], ["icicle", "Icicle", "callers above"], ["inverted", "Inverted", "what ran first, its callers below it"]];
  return (
    <>
      {difference ? <Verdict difference={difference} /> : <Quality model={model} sums={sums} rows={rows} filtered={filtered} select={(selected) => set({ selected })} />}
      <div class="bar" role="toolbar" aria-label="What is shown">
        <input ref={search} type="search" placeholder="search ( / )" aria-label="search functions" value={state.search}
          onInput={(event) => set({ search: event.currentTarget.value })} />
        <output id="matched">{matched === null ? "" : `matched ${percent(matched, sums.samples)}`}</output>
        <span class="group" role="group" aria-label="layout">
          {buttons.map(([layout, word, title]) => (
            <button key={layout} id={`layout-${layout}`} title={title} aria-pressed={state.layout === layout}
              onClick={() => set({ layout, zoom: [] })}>{word}</button>))}
        </span>
        <label title="fold native code into the Python function that called it"><input id="native" type="checkbox" checked={native}
          onChange={() => set({ native: !native, zoom: [] })} /> native frames</label>
        <label>by <select id="colouring" value={state.colouring}
          onChange={(event) => set({ colouring: event.currentTarget.value as Colouring })}>
          <option value="kind">language</option><option value="self">self time</option><option value="module">module</option>
          {difference && <option value="change">change</option>}
        </select></label>
        {state.colouring === "kind" && <span class="legend">
          <span><i style={{ background: "hsl(38 92% 67%)" }} /> Python</span><span><i style={{ background: "hsl(202 76% 72%)" }} /> native</span>
        </span>}
        {state.colouring === "change" && <span class="legend" id="legend">
          <span><i style={{ background: "hsl(8 85% 58%)" }} /> larger share after</span><span><i style={{ background: "hsl(210 85% 58%)" }} /> smaller</span>
        </span>}
        <Filters model={model} state={state} set={set} threadsToo={!difference} />
        <button id="all" disabled={!filtered && state.zoom.length === 0 && !state.search}
          onClick={() => setState({ ...START, layout: state.layout, colouring: state.colouring, native })}>Reset</button>
        <button onClick={() => setDark(!dark)} aria-label="light or dark">{dark ? "Light" : "Dark"}</button>
        <button onClick={() => keys.current?.showModal()}>Keys</button>
      </div>
      {!difference && <section class="time" aria-label="time line">
        <TimeLine model={model} sums={sums} range={range} dark={dark} lanes={told.threads.length > 1} select={(range) => set({ range })} />
        <Lanes model={model} thread={thread} process={process} range={range} dark={dark}
          select={(thread) => set({ thread, process: null })} />
      </section>}
      <main>
        <Graph model={model} all={difference ? "all: the mean of before and after" : `all: ${sums.samples} samples`} boxes={boxes} layout={state.layout} colouring={state.colouring} found={found}
          selected={state.selected} current={current} dark={dark} setCurrent={setCurrent} setWidth={setWidth} zoomTo={zoomTo} />
        <aside>
          {difference ? <ChangesTable model={model} difference={difference} search={state.search} selected={state.selected}
            select={(selected) => set({ selected })} />
          : <Functions model={model} rows={rows} samples={sums.samples} found={found} sort={state.sort} selected={state.selected} set={set} />}
          {!difference && state.selected !== null &&
            <Details model={model} tree={tree} total={weights.total} sums={sums} rows={rows} func={state.selected} set={set} />}
        </aside>
      </main>
      <footer id="status" aria-live="polite">{status}</footer>
      <dialog ref={keys} aria-label="keys">
        <table>{KEYS.map(([key, what]) => <tr key={key}><th>{key}</th><td>{what}</td></tr>)}</table>
        <form method="dialog"><button>Close</button></form>
      </dialog>
    </>
  );
}

function Filters({ model, state, set, threadsToo }: { model: Model; state: State; set: (change: Partial<State>) => void; threadsToo: boolean }) {
  const { processes, threads } = model.data.document;
  const modules = useMemo(() => {
    const sums = new Map<number, number>();
    const all = model.sums({ process: null, thread: null, module: null, range: null });
    for (const row of model.rows(all, true)) sums.set(model.module(row.func), (sums.get(model.module(row.func)) ?? 0) + row.own);
    return [...sums].sort((a, b) => b[1] - a[1]).map(([module]) => module);
  }, [model]);
  const number = (text: string) => (text === "" ? null : Number(text));
  const shown = threads.map((_, thread) => thread).filter((thread) => state.process === null || threads[thread]!.process === state.process);
  return (
    <>
      {threadsToo && processes.length > 1 && <select id="process" aria-label="process" value={state.process ?? ""}
        onChange={(event) => set({ process: number(event.currentTarget.value), thread: null })}>
        <option value="">all processes</option>
        {processes.map((process, index) => <option key={index} value={index}>{process.name}</option>)}
      </select>}
      {threadsToo && threads.length > 1 && <select id="thread" aria-label="thread" value={state.thread ?? ""}
        onChange={(event) => set({ thread: number(event.currentTarget.value) })}>
        <option value="">all threads</option>
        {shown.slice(0, 2000).map((thread) => <option key={thread} value={thread}>{threads[thread]!.name}</option>)}
      </select>}
      <select id="module" aria-label="module" value={state.module ?? ""}
        onChange={(event) => set({ module: number(event.currentTarget.value), zoom: [] })}>
        <option value="">all modules</option>
        {modules.slice(0, 2000).map((module) => <option key={module} value={module}>{model.text(module)}</option>)}
      </select>
    </>
  );
}

const app = document.getElementById("app")!;
app.textContent = "reading the data…";
async function read(): Promise<[Model, Difference | null]> {
  const texts = ["data", "difference"].map((id) => {
    const element = document.getElementById(id)!, text = element.textContent!;
    element.remove();
    return text;
  });
  const data = await load(texts[0]!);
  // The side before, and what the statistics say.
  const [before, changes] = texts[1]!.trim().split(" ");
  if (!before || !changes) return [new Model(data), null];
  const told = JSON.parse(new TextDecoder().decode(await unpack(changes))) as Changes;
  const joined = join(await load(before), data, told);
  return [new Model(joined.data), joined.difference];
}

read().then(([model, difference]) => {
  app.textContent = "";
  render(<App model={model} difference={difference} />, app);
  performance.mark("shown");
}, (error: unknown) => {
  app.textContent = `this report cannot be read: ${error}`;
});
