import { selection } from "../../state/app";
import { titleText } from "../../state/names";
import { grouped } from "../../state/numbers";
import { RouteLink } from "../route_link";

/** In place of a view that needs single allocations, on a step that only a monitor recorded. */
export function OnlyFigures() {
  const { step, device, steps } = selection.value!;
  return (
    <section class="state wide-state" data-testid="only-figures">
      <h1>
        Step {step} on {titleText(device)} has only the figures of MemoryMonitor.
      </h1>
      <p>
        It watches every step of a training at next to no cost, so it records peaks, not single allocations.{" "}
        <RouteLink to={{ view: "overview" }}>The Overview shows what there is.</RouteLink>
      </p>
      {steps.length > 0 && (
        <p data-testid="recorded-steps">
          Recorded in full:{" "}
          {steps.slice(0, 12).map((one, i) => (
            <span key={one.step}>
              {i > 0 && ", "}
              <RouteLink to={{ step: String(one.step) }}>step {one.step}</RouteLink>
            </span>
          ))}
          {steps.length > 12 && ` and ${grouped(steps.length - 12)} more`}.
        </p>
      )}
      <Recording />
    </section>
  );
}

/** What to add to the training for more than figures. */
export function HowToRecord() {
  return (
    <details class="card more" data-testid="how-to-record">
      <summary>Which modules, which lines, which moment? Record a few steps beside the monitor.</summary>
      <Recording />
    </details>
  );
}

function Recording() {
  const worker = JSON.stringify(titleText(selection.value!.worker));
  return (
    <>
      <p>Record some steps in full, with the same folder and the same worker name, and both show together:</p>
      <pre class="code" data-testid="record-code">
        {`from torch.profiler import profile, schedule
from tb_memplugin import memory_trace_handler

handler = memory_trace_handler(FOLDER, ${worker}, model=model, optimizer=optimizer)
plan = schedule(skip_first=10, wait=0, warmup=1, active=3, repeat=1)
with profile(profile_memory=True, on_trace_ready=handler, schedule=plan) as profiler:
    for batch in batches:
        train_step(batch)
        monitor.step()
        profiler.step()`}
      </pre>
    </>
  );
}
