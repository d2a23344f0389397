import { useState } from "preact/hooks";
import type { Frame } from "../../api/types";
import { frameFolder, frameWhere } from "../../state/frames";
import { cellText, titleText, visible } from "../../state/names";
import { grouped } from "../../state/numbers";
import { CopyButton } from "../copy_button";

const SHOWN = 200;

/** The frames of one stack, innermost first; those of C++ on demand where Python's tell more; all to the clipboard. */
export function FrameList({ title, frames }: { title: string; frames: Frame[] }) {
  const [all, setAll] = useState(false);
  if (frames.length === 0) return <p class="muted">No call stack was recorded.</p>;
  const python = frames.filter((frame) => frame.kind !== "native");
  const hidden = python.length > 0 ? frames.length - python.length : 0;
  const shown = (all || python.length === 0 ? frames : python).slice(0, SHOWN);
  return (
    <div class="frame-list">
      <h3 class="row">
        <span class="grow">{title}</span>
        {hidden > 0 && (
          <button type="button" class="quiet" data-testid="native-frames" onClick={() => setAll(!all)}>
            {all ? "hide C++" : `show ${grouped(hidden)} C++ ${hidden === 1 ? "frame" : "frames"}`}
          </button>
        )}
        <CopyButton
          label="copy stack"
          testid="copy-stack"
          text={() => frames.map((frame) => visible(frame.text)).join("\n")}
        />
      </h3>
      <ol class="stack" data-testid="frames" tabIndex={0} aria-label={title}>
        {shown.map((frame, i) => (
          <li key={i} class={`frame ${frame.kind}`} title={titleText(frame.text)}>
            <span class={`swatch flame-${frame.kind}`} aria-hidden="true" />
            <span class="mono function">{cellText(frame.function || frame.text)}</span>{" "}
            <span class="mono place">
              <span class="folder">{cellText(frameFolder(frame))}</span>
              <b>{frameWhere(frame)}</b>
            </span>
            {frame.fx && <span class="pill mono">fx {cellText(frame.fx)}</span>}
          </li>
        ))}
        {frames.length > SHOWN && shown.length === SHOWN && <li class="muted">and more: copy the stack for all of it</li>}
      </ol>
    </div>
  );
}
