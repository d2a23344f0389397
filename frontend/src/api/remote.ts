/** A server's answer inside a component: kept while the next one loads, aborted when nobody waits for it. */
import { signal } from "@preact/signals";
import { useEffect, useRef, useState } from "preact/hooks";
import { type Failure, failureOf, request, RequestFailed, without } from "./request";

export interface Remote<T> {
  /** The newest answer; it belongs to another path while `stale`. */
  data: T | undefined;
  stale: boolean;
  failure: Failure | undefined;
  status: number;
  loading: boolean;
  retry: () => void;
}

const LARGEST_CACHE = 60;
const cache = new Map<string, unknown>();

/** Rises whenever the runs changed on disk: every shown answer is asked for anew. */
const generation = signal(0);

export function forgetAnswers(): void {
  cache.clear();
  generation.value += 1;
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

/**
 * Fetches `path` (nothing where it is null) after `wait` milliseconds of quiet.
 * An old answer stays on show while the new one loads, where only `mayDiffer` of the path's query differs.
 */
export function useRemote<T>(path: string | null, wait = 0, mayDiffer: readonly string[] = []): Remote<T> {
  const [settled, settle] = useState<Settled<T>>({ path: null, data: undefined, failure: undefined, status: 200 });
  const [attempt, setAttempt] = useState(0);
  const last = useRef<Settled<T>>(settled);
  last.current = settled;
  const born = generation.value;

  useEffect(() => {
    if (path === null || cache.has(path)) return;
    const abort = new AbortController();
    const start = async (): Promise<void> => {
      try {
        const data = await request<T>(path, abort.signal);
        remember(path, data);
        settle({ path, data, failure: undefined, status: 200 });
      } catch (error) {
        if (abort.signal.aborted) return;
        const status = error instanceof RequestFailed ? error.status : 0;
        settle({ path, data: undefined, failure: failureOf(error, path), status });
      }
    };
    const timer = setTimeout(() => void start(), wait);
    return () => {
      clearTimeout(timer);
      abort.abort();
    };
  }, [path, attempt, born, wait]);

  const cached = path === null ? undefined : (cache.get(path) as T | undefined);
  useEffect(() => {
    if (cached !== undefined && last.current.path !== path)
      settle({ path, data: cached, failure: undefined, status: 200 });
  }, [path, cached]);

  const retry = (): void => setAttempt((n) => n + 1);
  if (cached !== undefined)
    return { data: cached, stale: false, failure: undefined, status: 200, loading: false, retry };
  const current = settled.path === path;
  const related = path !== null && settled.path !== null && without(mayDiffer, path) === without(mayDiffer, settled.path);
  return {
    data: current || related ? settled.data : undefined,
    stale: !current,
    failure: current ? settled.failure : undefined,
    status: current ? settled.status : 200,
    loading: path !== null && !current,
    retry,
  };
}
