/** How frames look in the flame graph: the user's code warm, libraries cool, C++ gray. */
import { ROOT, WITHOUT } from "../../api/codes";
import type { Frame, StacksAnswer } from "../../api/types";
import { toneOf } from "../../draw/flame";
import type { Bar, Paints } from "../../draw/paint_flame";
import { frameName, frameWhere } from "../../state/frames";

const TONES = { user: 4, library: 3, native: 2 };

export function frameBars({ nodes, frames }: StacksAnswer, searching: boolean): (paints: Paints) => (place: number) => Bar {
  return ({ read, category }) =>
    (place) => {
      const label = nodes.label[place]!;
      if (label === ROOT)
        return { fill: read("--flame-root"), name: "all allocations", more: "", strong: true, ink: read("--text"), found: searching && nodes.found[place] ? true : undefined };
      const found = searching ? nodes.found[place] === 1 : undefined;
      const frame: Frame | undefined = frames[label];
      if (label === WITHOUT || !frame) {
        const name = "no stack was recorded";
        return { fill: category("unknown"), name, more: "", strong: false, ink: read("--text"), found, plate: true };
      }
      const others = nodes.run[place]!.length - 1;
      return {
        fill: read(`--flame-${frame.kind}-${toneOf(frame.file, TONES[frame.kind])}`),
        name: frameName(frame),
        more: `${frameWhere(frame)}${others > 0 ? `  +${others}` : ""}`,
        strong: frame.kind === "user",
        ink: read(`--flame-${frame.kind}-text`),
        found,
      };
    };
}
