/** A server's answer inside a component: kept while the next one loads, aborted when nobody waits for it. */
import { effect, signal } from "@preact/signals";
import { useEffect, useRef, useState } from "preact/hooks";
import { type Failure, failureOf, reachable, request, RequestFailed, without } from "./request";

export interface Remote<T> {
  /** The newest answer; it belongs to another path while `stale`. */
  data: T | undefined;
  stale: boolean;
  failure: Failure | undefined;
  status: number;
  loading: boolean;
}

const LARGEST_CACHE = 60;
const cache = new Map<string, unknown>();

/** Rises whenever what is shown and not kept is to be asked for anew. */
const generation = signal(0);

export function askAgain(): void {
  generation.value = generation.peek() + 1;
}

/** Called when the runs changed on disk. */
export function forgetAnswers(): void {
  cache.clear();
  askAgain();
}

effect(() => {
  if (reachable.value) askAgain();
});

/** What the server could not answer, of all that the page waits for. Refusals (4xx) are told where they were asked for. */
export const failing = signal<readonly Failure[]>([]);

function tell(failure: Failure): () => void {
  failing.value = [...failing.peek(), failure];
  return () => void (failing.value = failing.peek().filter((other) => other !== failure));
}

/** What is under way, and how many wait for it: parts of a page that ask the same share one request. */
const underway = new Map<string, { answer: Promise<unknown>; abort: AbortController; waiting: number }>();

/** The answer of a path; the request is aborted once all who wait for it have been released. */
function shared<T>(path: string): { answer: Promise<T>; release: () => void } {
  let one = underway.get(path);
  if (!one) {
    const abort = new AbortController();
    one = { answer: request(path, abort.signal), abort, waiting: 0 };
    underway.set(path, one);
  }
  const mine = one;
  mine.waiting += 1;
  const release = (): void => {
    mine.waiting -= 1;
    if (mine.waiting > 0) return;
    if (underway.get(path) === mine) underway.delete(path);
    mine.abort.abort();
  };
  return { answer: mine.answer as Promise<T>, release };
}

function remember(path: string, answer: unknown): void {
  cache.delete(path);
  cache.set(path, answer);
  if (cache.size > LARGEST_CACHE) cache.delete(cache.keys().next().value!);
}

interface Settled<T> {
  path: string | null;
  data: T | undefined;
  failure: Failure | undefined;
  status: number;
}

function settledOf<T>(path: string): Settled<T> {
  return { path, data: cache.get(path) as T, failure: undefined, status: 200 };
}

/**
 * Fetches `path` (nothing where it is null) after `wait` milliseconds of quiet.
 * An old answer stays on show while the new one loads, where only `mayDiffer` of the path's query differs.
 */
export function useRemote<T>(path: string | null, wait = 0, mayDiffer: readonly string[] = []): Remote<T> {
  const [settled, settle] = useState<Settled<T>>({ path: null, data: undefined, failure: undefined, status: 200 });
  const last = useRef<Settled<T>>(settled);
  last.current = settled;
  const born = generation.value;

  useEffect(() => {
    if (path === null || cache.has(path)) return;
    let release: (() => void) | undefined;
    let left = false;
    const start = async (): Promise<void> => {
      const asked = shared<T>(path);
      release = asked.release;
      try {
        const data = await asked.answer;
        if (left) return;
        remember(path, data);
        settle({ path, data, failure: undefined, status: 200 });
      } catch (error) {
        if (left) return;
        const status = error instanceof RequestFailed ? error.status : 0;
        settle({ path, data: undefined, failure: failureOf(error, path), status });
      } finally {
        release?.();
        release = undefined;
      }
    };
    const timer = setTimeout(() => (cache.has(path) ? settle(settledOf(path)) : void start()), wait);
    return () => {
      left = true;
      clearTimeout(timer);
      release?.();
      release = undefined;
    };
  }, [path, born, wait]);

  const cached = path === null ? undefined : (cache.get(path) as T | undefined);
  useEffect(() => {
    if (cached !== undefined && last.current.path !== path)
      settle({ path, data: cached, failure: undefined, status: 200 });
  }, [path, cached]);

  const { failure, status } = settled;
  const broken = failure && settled.path === path && (status === 0 || status >= 500) ? failure : undefined;
  useEffect(() => broken && tell(broken), [broken]);

  if (cached !== undefined)
    return { data: cached, stale: false, failure: undefined, status: 200, loading: false };
  const current = settled.path === path;
  const related = path !== null && settled.path !== null && without(mayDiffer, path) === without(mayDiffer, settled.path);
  return {
    data: current || related ? settled.data : undefined,
    stale: !current,
    failure: current ? settled.failure : undefined,
    status: current ? settled.status : 200,
    loading: path !== null && !current,
  };
}
