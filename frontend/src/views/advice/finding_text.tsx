import type { Finding } from "../../api/types";
import { ruleName, titleOf } from "../../state/advice";
import { asPartOf, exactBytes, percent, withUnit } from "../../state/bytes";
import { titleText } from "../../state/names";
import { Sentence } from "../sentence";
import { Fact } from "../fact";

type Brief = Pick<Finding, "kind" | "level" | "step" | "title" | "subject" | "bytes" | "of_bytes" | "measure">;

/** What was found, and how much; `alone` where its step is the whole window. */
export function FindingHead({ finding, alone = false }: { finding: Brief; alone?: boolean }) {
  const { kind, level, step, bytes, of_bytes, measure } = finding;
  return (
    <header class="finding-head">
      <div class="grow">
        <p class="finding-kind">
          <span class="finding-level">{level === "problem" ? "Problem" : "Option"}</span>
          <span>{ruleName(kind)}</span>
          {step !== null && <span>{alone ? "whole window" : `step ${step}`}</span>}
        </p>
        <h2 class="finding-title breaking" data-testid="finding-title">
          <Sentence pieces={titleOf(finding)} />
        </h2>
      </div>
      <div class="finding-size">
        <span class="value amount" data-testid="finding-bytes" title={exactBytes(bytes)}>
          {asPartOf(of_bytes, bytes)}
        </span>
        <span class="under">{measure}</span>
        <span class="under" title={exactBytes(of_bytes)}>
          {percent(bytes, of_bytes)} of {withUnit(of_bytes)}
        </span>
      </div>
    </header>
  );
}

/** What to do about it, and the price. */
export function FindingAction({ finding: { what_to_do, price } }: { finding: Pick<Finding, "what_to_do" | "price"> }) {
  return (
    <dl class="finding-do">
      <Fact of="What to do" class="breaking">{titleText(what_to_do)}</Fact>
      {price !== "" && (
        <Fact of="Its price" class="breaking">{titleText(price)}</Fact>
      )}
    </dl>
  );
}
