import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";
import { base, isAlone, navigate, runs, selection } from "../state/app";
import { shortened, visible } from "../state/names";
import { inOrder, stepsOf, type Pick } from "../state/selection";
import { Picker } from "./pickers";
import { RouteLink } from "./route_link";

/** "Compare with": a button that says what, and a small panel to pick another run, worker or step. */
export function BasePicker() {
  const [open, setOpen] = useState(false);
  const box = useRef<HTMLDivElement>(null);
  const button = useRef<HTMLButtonElement>(null);
  const close = (): void => (setOpen(false), button.current?.focus());
  useEffect(() => {
    if (!open) return;
    const outside = (event: Event): void => void (!box.current?.contains(event.target as Node) && setOpen(false));
    const escape = (event: KeyboardEvent): void => void (event.key === "Escape" && close());
    document.addEventListener("pointerdown", outside);
    document.addEventListener("focusin", outside);
    document.addEventListener("keydown", escape);
    return () => {
      document.removeEventListener("pointerdown", outside);
      document.removeEventListener("focusin", outside);
      document.removeEventListener("keydown", escape);
    };
  }, [open]);
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
        onClick={() => setOpen(!open)}
      >
        {b ? baseLabel(b) : "nothing to compare with"}
      </button>
      {open && b && <BasePanel b={b} onDone={close} />}
    </div>
  );
}

function baseLabel(b: Pick): string {
  const s = selection.value;
  const step = `step ${b.step}`;
  if (s && b.run !== s.run && isAlone(b)) return shortened(visible(b.run), 28);
  if (!s || b.run !== s.run) return `${step} of ${shortened(visible(b.run), 28)}`;
  return b.worker === s.worker ? step : `${step} of ${shortened(visible(b.worker), 20)}`;
}

function BasePanel({ b, onDone }: { b: Pick; onDone: () => void }) {
  const panel = useRef<HTMLDivElement>(null);
  const [shift, setShift] = useState(0);
  useLayoutEffect(() => {
    const { left, right } = panel.current!.getBoundingClientRect();
    setShift(Math.max(8 - left, Math.min(0, document.documentElement.clientWidth - 8 - right)));
    panel.current!.querySelector("select")?.focus();
  }, []);
  const all = runs.value?.runs.filter((r) => r.workers.some((w) => w.steps.length > 0)) ?? [];
  const run = all.find((r) => r.run === b.run);
  const workers = run?.workers.filter((w) => w.steps.length > 0) ?? [];
  const worker = workers.find((w) => w.worker === b.worker);
  const steps = worker ? stepsOf(worker, b.device).map((s) => String(s.step)) : [];
  const pick = (patch: Partial<Pick>): void => {
    const next = { ...b, ...patch };
    navigate({
      base_run: next.run,
      base_worker: next.worker,
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
        value={b.run}
        options={all.map((r) => r.run).sort(inOrder)}
        onPick={(v) => pick({ run: v })}
      />
      <Picker
        label="Worker"
        testid="picker-base-worker"
        value={b.worker}
        options={workers.map((w) => w.worker).sort(inOrder)}
        onPick={(v) => pick({ worker: v })}
      />
      <Picker
        label="Step"
        testid="picker-base-step"
        value={String(b.step)}
        options={steps}
        onPick={(v) => pick({ step: Number(v) })}
      />
      <div class="row">
        <button
          type="button"
          class="quiet"
          data-testid="picker-base-reset"
          onClick={() => (navigate({ base_run: undefined, base_worker: undefined, base_step: undefined }), onDone())}
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
