import { ROOT, WITHOUT } from "../../api/codes";
import type { Frame, StacksAnswer } from "../../api/types";
import { asPartOf, exactBytes, percent } from "../../state/bytes";
import { titleText } from "../../state/names";
import { framePath } from "../../state/frames";
import { counted, grouped } from "../../state/numbers";
import { Tensor } from "../tensor";

const MOST = 9;

interface Props {
  answer: StacksAnswer;
  place: number;
}

/** A node in words: its frames, its exact bytes, its share, how many allocations, what ends in it. */
export function FlameTip({ answer, place }: Props) {
  const { nodes, frames } = answer;
  const bytes = nodes.bytes[place]!;
  const label = nodes.label[place]!;
  const run = nodes.run[place]!.map((row) => frames[row]!);
  const python = run.filter((frame) => frame.kind !== "native");
  const native = python.length > 0 ? run.length - python.length : 0;
  const zoom = nodes.bytes[nodes.id.indexOf(answer.node)] ?? answer.bytes;
  return (
    <>
      <div class="tip-bytes">
        <strong title={exactBytes(bytes)}>{asPartOf(answer.bytes, bytes)}</strong> · {exactBytes(bytes)}
      </div>
      <div>
        {percent(bytes, answer.bytes)} of {answer.of === "step" ? "all allocated" : "all alive"}
        {answer.node !== 0 && `, ${percent(bytes, zoom)} of the zoomed frame`} · {counted(nodes.count[place]!, "allocation")}
        <Tensor text={nodes.tensor[place]!} />
      </div>
      {nodes.own[place]! > 0 && nodes.own[place] !== bytes && <div>{exactBytes(nodes.own[place]!)} end in this frame</div>}
      {label === ROOT && <div class="tip-frame">all allocations</div>}
      {label === WITHOUT && <div class="tip-frame">no stack was recorded: allocated before recording began, or by code without Python</div>}
      <ol>
        {shown(python.length > 0 ? python : run).map((frame, i) =>
          typeof frame === "number" ? (
            <li key={i}>{grouped(frame)} more</li>
          ) : (
            <li key={i} class={`tip-frame ${frame.kind}`}>
              <b>{short(frame.function, 120)}</b> {short(framePath(frame), 160)}
              {frame.fx && <span> fx {short(frame.fx, 160)}</span>}
            </li>
          ),
        )}
        {native > 0 && <li class="tip-frame native">and {grouped(native)} of C++</li>}
      </ol>
    </>
  );
}

/** The first and last frames of a long run, and between them how many are left out. */
function shown(run: readonly Frame[]): (Frame | number)[] {
  if (run.length <= MOST) return [...run];
  const head = Math.ceil((MOST - 1) / 2);
  const tail = MOST - 1 - head;
  return [...run.slice(0, head), run.length - head - tail, ...run.slice(run.length - tail)];
}

function short(text: string, most: number): string {
  const whole = titleText(text);
  return whole.length <= most ? whole : `${whole.slice(0, most / 2)}…${whole.slice(-most / 2)}`;
}
