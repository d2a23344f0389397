import type { StepAnswer } from "../api/types";
import { cellText, titleText } from "../state/names";
import { CopyButton } from "./copy_button";

/** What lies in an allocation, `float32 [8, 2048]`, in small letters; nothing where that is not known. */
export function Tensor({ text }: { text: string | null }) {
  if (text === null) return null;
  return (
    <span class="approx mono" title={titleText(text)}>
      {" "}
      {cellText(text)}
    </span>
  );
}

/** Whether a profile lacks the dtypes and shapes of what its operators made. */
export function lacksShapes({ peak, source }: Pick<StepAnswer, "peak" | "source">): boolean {
  const made = peak.largest.filter((one) => one.category === "activation" && one.born_ns !== null);
  return source.kind === "torch.profiler" && made.length > 0 && made.every((one) => one.tensor === null);
}

/** How to record them. */
export function ShapesAreRecorded() {
  const command = "tb-memplugin run --shapes";
  return (
    <>
      Dtypes and shapes of activations were not recorded. Record with <span class="mono">record_shapes=True</span>, or{" "}
      <CopyButton label={command} testid="copy-shapes" title="Copy this command" text={() => command} look="quiet mono" />.
    </>
  );
}
