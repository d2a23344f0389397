import type { ComponentChildren } from "preact";
import { route } from "../../state/app";
import { lineParts } from "../../state/frames";
import { cellText, titleText } from "../../state/names";
import { grouped } from "../../state/numbers";
import { SortedHead } from "../sorted_head";

export const PAGE = 100;

interface HeadProps {
  id: string;
  label: string;
  title: string;
  number?: boolean;
}

/** A column's head. Lines begin at A. */
export function Head({ id, label, title, number = true }: HeadProps) {
  const now = route.value.ranked ?? "bytes";
  return (
    <SortedHead
      id={id}
      label={label}
      title={title}
      testid={`rank-${id}`}
      now={now}
      by="ranked"
      usual="bytes"
      words={!number}
    />
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
