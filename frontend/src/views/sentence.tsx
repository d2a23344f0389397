import { exactBytes } from "../state/bytes";
import type { Piece } from "../state/sentences";
import { Name } from "./name";

/** A sentence with its numbers strong and its names in monospace. */
export function Sentence({ pieces }: { pieces: Piece[] }) {
  return (
    <>
      {pieces.map((piece, i) => {
        if (typeof piece === "string") return <span key={i}>{piece}</span>;
        if ("name" in piece) return <Name key={i} text={piece.name} title={piece.title} chip />;
        return (
          <strong key={i} class="amount" title={piece.exact === undefined ? undefined : exactBytes(piece.exact)}>
            {piece.strong}
          </strong>
        );
      })}
    </>
  );
}

/** The sentence that opens a view. */
export function Headline({ pieces, testid = "headline" }: { pieces: Piece[]; testid?: string }) {
  return (
    <h1 class="headline" data-testid={testid}>
      <Sentence pieces={pieces} />
    </h1>
  );
}
