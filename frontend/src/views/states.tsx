import type { Failure } from "../api/request";
import { tryAgain } from "../state/app";
import { titleText } from "../state/names";
import { grouped } from "../state/numbers";
import { Fact } from "./fact";

/** The five lines; the folder is one below the log directory that was looked in. */
function recording(logdir: string): string {
  const folder = JSON.stringify(`${(logdir || "runs").replace(/\/+$/, "")}/first`);
  return `from torch.profiler import profile, schedule
from tb_memplugin import memory_trace_handler

handler = memory_trace_handler(${folder}, model=model, optimizer=optimizer)
with profile(profile_memory=True, schedule=schedule(wait=1, warmup=1, active=3),
             on_trace_ready=handler) as profiler:
    for batch in batches:
        train_step(batch)
        profiler.step()`;
}

/** Calm lines where the content will be; they appear only if the answer takes a moment. */
export function Loading({ what }: { what: string }) {
  return (
    <div class="loading" role="status" data-testid="loading">
      <p>Reading {what} …</p>
      <div class="skeleton wide" />
      <div class="skeleton" />
      <div class="skeleton tall" />
    </div>
  );
}

/** What went wrong, where, and what to do. */
export function FailureState({ failure }: { failure: Failure }) {
  return (
    <section class="state" role="alert" data-testid="error-state">
      <h1>{titleText(failure.what)}</h1>
      <dl>
        <Fact of="Where" class="mono breaking">{titleText(failure.where)}</Fact>
        <Fact of="What to do">{titleText(failure.fix)}</Fact>
      </dl>
      <button type="button" class="action" data-testid="retry" onClick={tryAgain}>
        Try again
      </button>
    </section>
  );
}

/** No run yet, or none that holds memory: how to record one, and how to find out why none shows. */
export function EmptyState({ logdir, empty }: { logdir: string; empty: number }) {
  return (
    <section class="state" data-testid="empty-state">
      <h1>No memory has been recorded here yet.</h1>
      <p>
        {empty > 0 && `${empty === 1 ? "One run is" : `${grouped(empty)} runs are`} here, with no memory recorded. `}
        Looked in <span class="mono breaking">{titleText(logdir) || "TensorBoard's log directory"}</span>. To record a
        training as it is:
      </p>
      <pre class="code" data-testid="record-command">tb-memplugin run --logdir {titleText(logdir) || "LOGDIR"} train.py</pre>
      <p>Where you profile already, give the profiler this handler and a folder in that directory:</p>
      <pre class="code" data-testid="record-code">
        {recording(titleText(logdir))}
      </pre>
      <p>
        This page shows the step as soon as TensorBoard has read it. If you have recorded one already, find out why it is
        not here:
      </p>
      <pre class="code">tb-memplugin doctor {titleText(logdir) || "LOGDIR"}</pre>
      <button type="button" class="action" data-testid="retry" onClick={tryAgain}>
        Look again
      </button>
    </section>
  );
}
