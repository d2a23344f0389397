import { base, isAlone, navigate, runs, selection } from "../state/app";
import { shortened, visible } from "../state/names";
import { runName } from "../state/run_name";
import { FOUND_BASE, inOrder, stepsOf, type Pick } from "../state/selection";
import { useOpened, usePanel } from "./panel";
import { Picker } from "./picker";
import { RouteLink } from "./route_link";
import { MOST_LISTED, nearestStep, TypedStep } from "./typed_step";

/** "Compare with": a button that says what, and a small panel to pick another run, worker or step. */
export function BasePicker() {
  const { open, flip, close, box, button } = usePanel();
  const b = base.value;
  return (
    <div class="picker base" ref={box}>
      <span>Compare with</span>
      <button
        type="button"
        ref={button}
        class="dashed"
        data-testid="picker-base"
        title={b ? baseLabel(b) : undefined}
        aria-expanded={open}
        aria-haspopup="dialog"
        onClick={flip}
      >
        {b ? baseLabel(b) : "nothing picked"}
      </button>
      {open && <BasePanel b={b} onDone={close} />}
    </div>
  );
}

function baseLabel(b: Pick): string {
  const s = selection.value;
  const step = isAlone(b) ? "whole window" : `step ${b.step}`;
  if (s && b.run !== s.run && isAlone(b)) return shortened(visible(runName(b.run)), 28);
  if (!s || b.run !== s.run) return `${step} of ${shortened(visible(runName(b.run)), 28)}`;
  return b.worker === s.worker ? step : `${step} of ${shortened(visible(b.worker), 20)}`;
}

function BasePanel({ b, onDone }: { b: Pick | null; onDone: () => void }) {
  const { panel, shift } = useOpened("select");
  const all = runs.value?.runs.filter((r) => r.workers.some((w) => w.steps.length > 0)) ?? [];
  const run = all.find((r) => r.run === b?.run);
  const workers = run?.workers.filter((w) => w.steps.length > 0) ?? [];
  const worker = workers.find((w) => w.worker === b?.worker);
  const steps = worker && b ? stepsOf(worker, b.device).map((s) => s.step) : [];
  const pick = (patch: Partial<Pick>): void => {
    const next = { ...b, ...patch };
    navigate({
      base_run: next.run,
      base_worker: next.worker,
      base_device: undefined,
      base_step: "step" in patch ? String(next.step) : undefined,
    });
  };
  return (
    <div
      ref={panel}
      class="panel"
      style={{ translate: `${shift}px` }}
      role="dialog"
      aria-label="Compare with"
      data-testid="picker-base-panel"
    >
      <Picker
        label="Run"
        testid="picker-base-run"
        value={b?.run ?? ""}
        options={all.map((r) => r.run).sort(inOrder)}
        onPick={(v) => pick({ run: v })}
        name={runName}
      />
      {b && (
        <Picker
          label="Worker"
          testid="picker-base-worker"
          value={b.worker}
          options={workers.map((w) => w.worker).sort(inOrder)}
          onPick={(v) => pick({ worker: v })}
        />
      )}
      {b === null ? null : steps.length > MOST_LISTED ? (
        <label class="picker">
          <span>Step</span>
          <span class="stepper">
            <TypedStep
              testid="picker-base-step"
              step={b.step}
              first={steps[0]!}
              last={steps.at(-1)!}
              offered={[]}
              found={(typed) => nearestStep(steps, typed)}
              onPick={(step) => pick({ step })}
            />
          </span>
        </label>
      ) : (
        <Picker
          label="Step"
          testid="picker-base-step"
          value={String(b.step)}
          options={steps.map(String)}
          onPick={(v) => pick({ step: Number(v) })}
        />
      )}
      <div class="row">
        <button
          type="button"
          class="quiet"
          data-testid="picker-base-reset"
          onClick={() => (navigate(FOUND_BASE), onDone())}
        >
          The step before
        </button>
        <span class="grow" />
        <span onClick={onDone}>
          <RouteLink to={{ view: "compare" }} class="action">
            Compare
          </RouteLink>
        </span>
      </div>
    </div>
  );
}
