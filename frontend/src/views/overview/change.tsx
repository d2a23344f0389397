import { address } from "../../api/request";
import { useRemote } from "../../api/remote";
import type { CompareAnswer, StepAnswer } from "../../api/types";
import { alone, base, isAlone } from "../../state/app";
import { unitFor } from "../../state/bytes";
import type { Pick } from "../../state/selection";
import { changeSince } from "../../state/sentences";
import { AnotherRun } from "../another_run";
import { RouteLink } from "../route_link";
import { Sentence } from "../sentence";

/** What is different from what "Compare with" says, and the way to another run. */
export function Change({ answer }: { answer: StepAnswer }) {
  const basis = base.value;
  return (
    <p class="lead" data-testid="change">
      {basis ? (
        <Since answer={answer} basis={basis} />
      ) : (
        `The only ${alone.value ? "recording" : "step"} here: there is nothing to compare it with.`
      )}
      {(basis === null || basis.run === answer.run) && <AnotherRun lead=" · " />}
    </p>
  );
}

function Since({ answer, basis }: { answer: StepAnswer; basis: Pick }) {
  const { run, worker, device, step } = answer;
  const sides = { base_run: basis.run, base_worker: basis.worker, base_step: basis.step, base_device: basis.device };
  const change = useRemote<CompareAnswer>(address("compare", { by: "module", run, worker, device, step, ...sides }));
  const link = {
    view: "compare",
    base_run: basis.run,
    base_worker: basis.worker,
    base_step: String(basis.step),
    what: "module",
  } as const;
  const same = change.data?.rows.every((row) => row.delta_bytes === 0);
  return (
    <>
      {change.data ? (
        <Sentence pieces={changeSince(named(change.data), unitFor(answer.peak.bytes))} />
      ) : change.failure ? (
        change.failure.what
      ) : (
        "Comparing …"
      )}{" "}
      {!same && (
        <RouteLink to={link} testid="show-difference">
          Show the difference
        </RouteLink>
      )}
    </>
  );
}

function named(answer: CompareAnswer): CompareAnswer {
  return { ...answer, base: { ...answer.base, alone: isAlone(answer.base) } };
}
