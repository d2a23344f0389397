/** One request to the plugin's routes: the answer, or what went wrong, where, and what to do. */

import { signal } from "@preact/signals";
import { titleText } from "../state/names";

/** Whether the last request reached TensorBoard: a proxy or a tunnel may answer in its place. */
export const reachable = signal(true);
const PROXIES: readonly number[] = [502, 503, 504];

export interface Failure {
  what: string;
  where: string;
  fix: string;
}

export class RequestFailed extends Error {
  readonly failure: Failure;
  readonly status: number;

  constructor(failure: Failure, status: number) {
    super(failure.what);
    this.failure = failure;
    this.status = status;
  }
}

/** What to tell of anything that was thrown. */
export function failureOf(error: unknown, where: string): Failure {
  return error instanceof RequestFailed ? error.failure : { what: String(error), where, fix: "Try again." };
}

export type Query = Record<string, string | number | undefined>;

/** The route's address below the document's base, data/plugin/tb_memplugin/. */
export function address(route: string, query: Query = {}): string {
  const pairs = Object.entries(query)
    .filter(([, value]) => value !== undefined)
    .map(([key, value]) => `${encodeURIComponent(key)}=${encodeURIComponent(String(value))}`);
  return pairs.length > 0 ? `${route}?${pairs.join("&")}` : route;
}

/** A path without some keys of its query. */
export function without(keys: readonly string[], path: string): string {
  const [route, ...pairs] = path.split(/[?&]/);
  return [route, ...pairs.filter((pair) => !keys.includes(pair.split("=", 1)[0]!))].join("&");
}

/** What has been waited for too long, without an end. */
export const late = signal<readonly Failure[]>([]);
const LATE_SECONDS = 10;

export async function request<T>(path: string, signal?: AbortSignal): Promise<T> {
  const where = path.split("?")[0] ?? path;
  const overdue = {
    what: `TensorBoard has not answered for ${LATE_SECONDS} seconds.`,
    where,
    fix: "It may still be reading a large recording; its log says if something failed.",
  };
  const timer = setTimeout(() => (late.value = [...late.peek(), overdue]), 1000 * LATE_SECONDS);
  try {
    return await answerOf<T>(path, where, signal);
  } finally {
    clearTimeout(timer);
    if (late.peek().includes(overdue)) late.value = late.peek().filter((other) => other !== overdue);
  }
}

async function answerOf<T>(path: string, where: string, signal?: AbortSignal): Promise<T> {
  let response: Response;
  try {
    response = await fetch(path, { headers: { Accept: "application/json" }, ...(signal ? { signal } : {}) });
  } catch (error) {
    if (signal?.aborted) throw error;
    reachable.value = false;
    throw new RequestFailed(unreachable(where), 0);
  }
  reachable.value = !PROXIES.includes(response.status);
  if (!reachable.value) throw new RequestFailed(unreachable(where), response.status);
  const body = await bodyOf(response);
  signal?.throwIfAborted();
  if (!response.ok) throw new RequestFailed(failureIn(body, where, response.status), response.status);
  if (body === undefined) throw new RequestFailed(notJson(where), response.status);
  return body as T;
}

async function bodyOf(response: Response): Promise<unknown> {
  try {
    return await response.json();
  } catch {
    return undefined;
  }
}

function failureIn(body: unknown, where: string, status: number): Failure {
  const error = (body as { error?: Partial<Failure> } | undefined)?.error;
  if (error && typeof error.what === "string") {
    return {
      what: titleText(error.what),
      where: titleText(String(error.where ?? where)),
      fix: titleText(String(error.fix ?? "Try again.")),
    };
  }
  return {
    what: `The server answered with status ${status} and no explanation.`,
    where,
    fix: "Look at TensorBoard's log for the traceback, then try again.",
  };
}

function unreachable(where: string): Failure {
  return {
    what: "TensorBoard did not answer.",
    where,
    fix: "Check that its process still runs and that this machine can reach it. This page asks again every 5 seconds.",
  };
}

function notJson(where: string): Failure {
  return {
    what: "The answer is not JSON.",
    where,
    fix: "A proxy between this page and TensorBoard may have replaced it; open the page without the proxy, or sign in again.",
  };
}
