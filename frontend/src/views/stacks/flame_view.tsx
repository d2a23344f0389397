import { useMemo } from "preact/hooks";
import { WITHOUT } from "../../api/codes";
import type { StacksAnswer } from "../../api/types";
import { navigate } from "../../state/app";
import { exactBytes, percent, withUnit } from "../../state/bytes";
import { frameName } from "../../state/frames";
import { grouped } from "../../state/numbers";
import { FlameChart } from "../flame_chart";
import { FlameTip } from "./flame_tip";
import { frameBars } from "./frame_bars";
import { KeyEntry } from "../key_entry";

/** Which frames the graph shows. */
export const FRAMES = [
  ["folded", "Folded"],
  ["all", "Every frame"],
  ["user", "Your code"],
] as const;

interface Props {
  answer: StacksAnswer;
  searching: boolean;
  frames: (typeof FRAMES)[number][0];
}

/** Calls from the outermost frame at the top; as wide as the bytes that they allocated. */
export function FlameView({ answer, searching, frames }: Props) {
  const look = useMemo(() => frameBars(answer, searching), [answer, searching]);
  return (
    <section class="card flame-card">
      <div class="row">
        <h2 class="grow">
          {answer.of === "step" ? "Allocated bytes" : "Live bytes"} by call stack, outermost frame at the top
        </h2>
        <FlameKey without={answer.nodes.label.includes(WITHOUT)} />
        {answer.node !== 0 && (
          <button type="button" class="small" data-testid="flame-reset" onClick={() => navigate({ node: undefined })}>
            all stacks
          </button>
        )}
      </div>
      <FlameChart
        testid="flame"
        level={21}
        tree={answer.nodes}
        zoom={answer.node}
        look={look}
        label={spoken(answer)}
        tip={(place) => <FlameTip answer={answer} place={place} />}
        tipKey={(place) => answer.nodes.id[place]!}
        fresh={[answer.event, answer.of, answer.node, frames]}
        onZoom={(place) => navigate({ node: place === 0 ? undefined : String(answer.nodes.id[place]) })}
      />
      <p class="foot">
        click or Enter zooms in, Esc zooms out, arrow keys walk from frame to frame
        {frames === "folded" && " · +3 stands for three more frames that all share"}
        {answer.omitted > 0 && ` · ${grouped(answer.omitted)} narrower than half a pixel: zoom in for more`}
      </p>
    </section>
  );
}

function FlameKey({ without }: { without: boolean }) {
  return (
    <span class="keys" aria-hidden="true">
      <KeyEntry look="swatch flame-user">your code</KeyEntry>
      <KeyEntry look="swatch flame-library">libraries</KeyEntry>
      <KeyEntry look="swatch flame-native">C++</KeyEntry>
      {without && (
        <KeyEntry look="swatch flame-none">no stack</KeyEntry>
      )}
    </span>
  );
}

/** The picture in words: the widest frames. */
function spoken(answer: StacksAnswer): string {
  const { nodes, frames } = answer;
  const widest = nodes.label
    .map((label, place) => ({ label, place }))
    .filter(({ label, place }) => label >= 0 && nodes.bytes[place]! < answer.bytes)
    .slice(0, 400)
    .sort((a, b) => nodes.bytes[b.place]! - nodes.bytes[a.place]!)
    .slice(0, 6)
    .map(({ label, place }) => `${frameName(frames[label]!)} ${percent(nodes.bytes[place]!, answer.bytes)}`);
  return `Flame graph of ${withUnit(answer.bytes)} (${exactBytes(answer.bytes)}) by call stack. ${widest.join(", ")}. Arrow keys walk, Enter zooms.`;
}
