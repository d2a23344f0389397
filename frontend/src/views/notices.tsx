import { useState } from "preact/hooks";
import type { ComponentChildren } from "preact";
import type { Note, Problem } from "../api/types";
import { counted, grouped } from "../state/numbers";
import { titleText } from "../state/names";

/** One remark about what is shown: its kind as a word and a color, then the text. */
export function Notice({
  level,
  children,
  testid = "notice",
}: {
  level: "info" | "warning";
  children: ComponentChildren;
  testid?: string;
}) {
  return (
    <div class={`notice ${level}`} role="note" data-testid={testid}>
      <span class="kind">{level === "warning" ? "Warning" : "Note"}</span>
      <span class="breaking">{children}</span>
    </div>
  );
}

export function Notes({ notes }: { notes: Pick<Note, "level" | "text">[] }) {
  if (notes.length === 0) return null;
  return (
    <section class="notes" data-testid="notices" aria-label="What is not exact, and why">
      {notes.map((note, i) => (
        <Notice key={i} level={note.level === "warning" ? "warning" : "info"}>
          {titleText(note.text)}
        </Notice>
      ))}
    </section>
  );
}

/** Files that could not be read: one line, the list on demand, gone when dismissed until the list changes. */
export function Problems({ problems }: { problems: Problem[] }) {
  const [open, setOpen] = useState(false);
  const [dismissed, setDismissed] = useState("");
  const identity = JSON.stringify(problems);
  if (problems.length === 0 || dismissed === identity) return null;
  const count = `${counted(problems.length, "file")} could not be read`;
  return (
    <section class="problems" data-testid="problems" aria-label="Files that could not be read">
      <div class="row">
        <span class="kind">Warning</span>
        <span class="grow">{count}; everything else is shown.</span>
        <button
          type="button"
          class="quiet"
          aria-expanded={open}
          data-testid="problems-toggle"
          onClick={() => setOpen(!open)}
        >
          {open ? "Hide" : "Which, and why"}
        </button>
        <button type="button" class="quiet" data-testid="problems-dismiss" onClick={() => setDismissed(identity)}>
          Dismiss
        </button>
      </div>
      {open && (
        <ul>
          {problems.slice(0, 200).map((problem, i) => (
            <li key={i}>
              <div class="mono breaking">{titleText(problem.file)}</div>
              <div>{titleText(problem.reason)}</div>
              <div class="muted">{titleText(problem.fix)}</div>
            </li>
          ))}
          {problems.length > 200 && <li>and {grouped(problems.length - 200)} more</li>}
        </ul>
      )}
    </section>
  );
}
