/** The answer of `advice`, see docs/http_api.md. Bytes are integers. */

export type Level = "problem" | "option";
export type Verdict = "found" | "fine" | "not judged";

/** A view of the tab and the state in its address. */
export interface Where {
  view: string;
  state: Record<string, string>;
}

export interface Evidence {
  what: string;
  bytes: number;
  detail: string;
  /** `what` is a name from outside, not a word of ours. */
  name: boolean;
  where: Where | null;
}

export interface Finding {
  kind: string;
  level: Level;
  step: number | null;
  title: string;
  subject: string;
  bytes: number;
  measure: string;
  of_bytes: number;
  what_to_do: string;
  price: string;
  levels: number[];
  evidence: Evidence[];
  where: Where;
}

export interface Judgement {
  kind: string;
  verdict: Verdict;
  why: string;
}

export interface AdviceAnswer {
  steps: number[];
  findings: Finding[];
  judgements: Judgement[];
}
