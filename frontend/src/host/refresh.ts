/** Says when the data may have changed: TensorBoard's messages, or every 30 seconds where it sends none. */
import { connect, DATA_RELOADED, GET_RUNS, RUNS_CHANGED } from "./messages";

const EVERY = 30_000;

export function onDataChanged(callback: () => void): void {
  const host = connect();
  const gathered = later(callback, 200);
  host?.on(RUNS_CHANGED, gathered);
  host?.on(DATA_RELOADED, gathered);
  const poll = (): void => void whileShown(callback, EVERY);
  if (host) host.ask(GET_RUNS).catch(poll);
  else poll();
}

/** Calls back every so many milliseconds while someone can see the page; returns how to end that. */
export function whileShown(callback: () => void, every: number): () => void {
  const timer = setInterval(() => isShown() && callback(), every);
  return () => clearInterval(timer);
}

/** A hidden tab keeps its frame, with a height (sometimes also a width) of 0. */
function isShown(): boolean {
  return document.visibilityState === "visible" && frameHasSize();
}

function frameHasSize(): boolean {
  return window.innerWidth > 0 && window.innerHeight > 0;
}

/** Calls back when someone comes back to the tab. */
export function onShown(callback: () => void): void {
  let shown = frameHasSize();
  window.addEventListener("resize", () => {
    const now = frameHasSize();
    if (now && !shown) setTimeout(callback, 300); // TensorBoard has written its own address by then
    shown = now;
  });
}

function later(callback: () => void, wait: number): () => void {
  let timer: ReturnType<typeof setTimeout> | undefined;
  return () => {
    clearTimeout(timer);
    timer = setTimeout(callback, wait);
  };
}
