/**
 * The route in two places: our own hash (it survives a reload of the frame) and, as p.tb_memplugin.*, TensorBoard's
 * (it can be shared). TensorBoard's hash is `#tab&key=value…`; we touch no key but ours and never change the tab.
 * pushState and replaceState fire no hashchange, so TensorBoard's own routing does not run; Back does.
 */
import { formatRoute, parseRoute, type Route } from "../state/route";

const PLUGIN = "tb_memplugin";
const PREFIX = `p.${PLUGIN}.`;

/** The hash with our keys replaced; null where another tab is open and the address is not ours to write. */
export function withOurKeys(hash: string, route: Route): string | null {
  const pieces = hash
    .replace(/^#/, "")
    .split("&")
    .filter((piece) => piece !== "");
  const tab = pieces.find((piece) => !piece.includes("="));
  if (tab !== undefined && tab !== PLUGIN) return null;
  const others = pieces.filter((piece) => piece.includes("=") && !isOurs(piece));
  return `#${[PLUGIN, ...others, formatRoute(route, PREFIX)].join("&")}`;
}

/** Our keys in TensorBoard's hash, or null where it has none. */
export function ourKeys(hash: string): Route | null {
  const ours = hash.replace(/^#/, "").split("&").filter(isOurs);
  if (ours.length === 0) return null;
  return parseRoute(ours.map((piece) => piece.slice(piece.indexOf(PREFIX) + PREFIX.length)).join("&"));
}

function isOurs(piece: string): boolean {
  return piece.startsWith(PREFIX);
}

/** The window whose address people see and share; null where it is not ours to read. */
function shared(): Window | null {
  try {
    if (window.parent === window) return null;
    void window.parent.location.hash;
    return window.parent;
  } catch {
    return null;
  }
}

/** Never from TensorBoard's message GetURLPluginData: it answers with the address as of the last hashchange. */
export function readAddress(): Route {
  const parent = shared();
  return (parent && ourKeys(parent.location.hash)) ?? parseRoute(window.location.hash);
}

/** TensorBoard's own filter of runs, a regular expression; "" where there is none, or it is not ours to read. */
export function hostFilter(): string {
  return new URLSearchParams(shared()?.location.search ?? "").get("runFilter") ?? "";
}

/**
 * Writes both places; `lasting` makes a step that Back returns from, in the window that people see alone.
 * The frame's document has a <base>, so the address must be written in full.
 */
export function writeAddress(route: Route, lasting = false): void {
  const parent = shared();
  const here = window.location;
  tryWrite(window, `${here.pathname}${here.search}#${formatRoute(route)}`, lasting && !parent);
  if (!parent || window.innerWidth === 0 || window.innerHeight === 0) return;
  const hash = withOurKeys(parent.location.hash, route);
  if (hash !== null) tryWrite(parent, `${parent.location.pathname}${parent.location.search}${hash}`, lasting);
}

function tryWrite(target: Window, address: string, lasting: boolean): void {
  const { history, location } = target;
  try {
    if (lasting && address !== `${location.pathname}${location.search}${location.hash}`)
      history.pushState(history.state, "", address);
    else history.replaceState(history.state, "", address);
  } catch {
    // A sandboxed or very chatty page: the picks still work, only the address stays behind.
  }
}

/** The address to give a link, so that it opens in a tab of its own. */
export function addressOf(route: Route): string {
  const parent = shared();
  const own = `${window.location.pathname}${window.location.search}#${formatRoute(route)}`;
  const hash = parent ? withOurKeys(parent.location.hash, route) : null;
  return parent && hash !== null ? `${parent.location.pathname}${parent.location.search}${hash}` : own;
}

/** Calls back with the route when someone edits the address or goes back. */
export function onAddressEdited(callback: (route: Route) => void): void {
  const parent = shared();
  const target = parent ?? window;
  const heard = (): void => {
    const route = parent ? ourKeys(parent.location.hash) : parseRoute(window.location.hash);
    if (route) callback(route);
  };
  target.addEventListener("hashchange", heard);
  window.addEventListener("pagehide", () => target.removeEventListener("hashchange", heard));
}
