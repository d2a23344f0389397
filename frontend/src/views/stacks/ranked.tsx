import type { ComponentChildren } from "preact";
import { navigate, route } from "../../state/app";
import { lineParts } from "../../state/frames";
import { cellText, titleText } from "../../state/names";
import { grouped } from "../../state/numbers";

export const PAGE = 100;

interface HeadProps {
  id: string;
  label: string;
  title: string;
  number?: boolean;
}

/** A column's head: a click sorts downwards, a second one upwards. Lines begin at A. */
export function Head({ id, label, title, number = true }: HeadProps) {
  const ranked = route.value.ranked ?? "bytes";
  const current = ranked.replace(/^-/, "") === id;
  const upwards = ranked.startsWith("-") !== (id === "line");
  const next = current && !ranked.startsWith("-") ? `-${id}` : id;
  return (
    <th
      scope="col"
      class={number ? "number" : undefined}
      aria-sort={current ? (upwards ? "ascending" : "descending") : undefined}
    >
      <button
        type="button"
        class="sorts"
        title={title}
        data-testid={`rank-${id}`}
        onClick={() => navigate({ ranked: next === "bytes" ? undefined : next })}
      >
        {label}
        {current ? (upwards ? " ▴" : " ▾") : ""}
      </button>
    </th>
  );
}

/** A source line: what tells it apart first, behind it who called it, else its folder. */
export function Line({ line, kind, by = "" }: { line: string; kind: string; by?: string }) {
  const { place, name, folder } = lineParts(line);
  return (
    <span class="source-line" title={titleText(line)}>
      <span class={`swatch flame-${kind}`} aria-hidden="true" />
      <span class="mono place">{cellText(place)}</span>
      {name && <span class={kind === "user" ? "mono called strong" : "mono called"}>{cellText(name)}</span>}
      {(by || folder) && <span class="folder">{by || (folder.length > 90 ? `…${folder.slice(-88)}` : folder)}</span>}
    </span>
  );
}

/** Which rows are on show, and the way to the next ones. */
export function Pages({ first, count, all, onGo }: { first: number; count: number; all: number; onGo: (first: number) => void }) {
  if (all <= PAGE && first === 0) return null;
  return (
    <span class="pages">
      <button type="button" class="small" disabled={first === 0} onClick={() => onGo(Math.max(0, first - PAGE))}>
        ‹ before
      </button>
      <span data-testid="page">
        {grouped(first + 1)} to {grouped(first + count)} of {grouped(all)}
      </span>
      <button type="button" class="small" disabled={first + count >= all} onClick={() => onGo(first + PAGE)}>
        next ›
      </button>
    </span>
  );
}

export function Bar({ share, kind }: { share: number; kind: string }) {
  return (
    <span class="share-bar" aria-hidden="true">
      <i class={`flame-${kind}`} style={{ width: `${(100 * share).toFixed(2)}%` }} />
    </span>
  );
}

export function Tools({ picker, children }: { picker: ComponentChildren; children: ComponentChildren }) {
  return (
    <div class="tools">
      {picker}
      {children}
    </div>
  );
}
