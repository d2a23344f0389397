import { useEffect, useRef, useState } from "preact/hooks";
import { shortened, titleText, visible } from "../state/names";
import { counted } from "../state/numbers";
import { useOpened, usePanel } from "./panel";

interface Props {
  label: string;
  testid: string;
  value: string;
  options: string[];
  onPick: (value: string) => void;
  name?: (value: string) => string;
}

/** More are searched by typing. */
const MOST_IN_SELECT = 12;

/** A native select: quick, reachable by keyboard, and never longer than it may be. */
export function Picker({ label, testid, value, options, onPick, name = (v) => v }: Props) {
  const shown = (option: string): string => shortened(visible(name(option)), 32);
  if (options.length > MOST_IN_SELECT) {
    const title = titleText(value);
    return <SearchPicker {...{ label, testid, value, options, onPick, shown, title }} />;
  }
  return (
    <label class="picker">
      <span>{label}</span>
      <select
        data-testid={testid}
        title={visible(value)}
        value={String(options.indexOf(value))}
        onChange={(event) => onPick(options[Number(event.currentTarget.value)] ?? value)}
      >
        {options.map((option, i) => (
          <option key={option} value={String(i)}>
            {shown(option)}
          </option>
        ))}
      </select>
    </label>
  );
}

interface SearchProps {
  label: string;
  testid: string;
  value: string;
  options: string[];
  onPick: (value: string) => void;
  /** What a value is called; short enough to show. */
  shown: (value: string) => string;
  title: string;
}

/** More are no help in a list: one goes on typing. */
const MOST_SHOWN = 100;

/** Of many, the one that is wanted is found by typing a part of its name. */
function SearchPicker({ label, testid, value, options, onPick, shown, title }: SearchProps) {
  const { open, flip, close, box, button } = usePanel(value);
  return (
    <div class="picker" ref={box}>
      <span aria-hidden="true">{label}</span>
      <button
        type="button"
        ref={button}
        class="opens"
        data-testid={testid}
        title={title}
        aria-label={`${label}: ${shown(value)}`}
        aria-haspopup="dialog"
        aria-expanded={open}
        onClick={flip}
      >
        {shown(value)}
      </button>
      {open && (
        <Choices
          label={label}
          testid={testid}
          value={value}
          options={options}
          shown={shown}
          onClose={close}
          onPick={(picked) => (close(), picked !== value && onPick(picked))}
        />
      )}
    </div>
  );
}

type ChoicesProps = Omit<SearchProps, "title"> & { onClose: () => void };

function Choices({ label, testid, value, options, shown, onClose, onPick }: ChoicesProps) {
  const { panel, shift } = useOpened("input");
  const [text, setText] = useState("");
  const found = matching(options, text, shown);
  const listed = found.slice(0, MOST_SHOWN);
  const [at, setAt] = useState(Math.max(0, listed.indexOf(value)));
  const list = useRef<HTMLUListElement>(null);
  const id = (row: number): string => `${testid}-choice-${row}`;
  useEffect(() => list.current?.children[at]?.scrollIntoView({ block: "nearest" }), [at, text]);
  const keys = (event: KeyboardEvent): void => {
    if (event.key === "ArrowDown") setAt(Math.min(at + 1, listed.length - 1));
    else if (event.key === "ArrowUp") setAt(Math.max(at - 1, 0));
    else if (event.key === "Enter" && listed[at] !== undefined) onPick(listed[at]);
    else if (event.key === "Escape") {
      event.stopPropagation(); // a panel around this one stays open
      onClose();
    } else return;
    event.preventDefault();
  };
  return (
    <div ref={panel} class="panel choices" style={{ translate: `${shift}px` }} role="dialog" aria-label={label}>
      <input
        class="search"
        type="text"
        role="combobox"
        aria-label={`Search: ${label}`}
        aria-expanded="true"
        aria-controls={`${testid}-choices`}
        aria-autocomplete="list"
        aria-activedescendant={listed.length > 0 ? id(at) : undefined}
        placeholder={`Search ${counted(options.length, "name")}`}
        data-testid={`${testid}-search`}
        value={text}
        onInput={(event) => (setText(event.currentTarget.value), setAt(0))}
        onKeyDown={keys}
      />
      <ul ref={list} role="listbox" id={`${testid}-choices`} aria-label={label}>
        {listed.map((option, row) => (
          <li
            key={option}
            id={id(row)}
            role="option"
            aria-selected={option === value}
            class={row === at ? "at" : undefined}
            data-testid={`${testid}-option`}
            title={shown(option)}
            onClick={() => onPick(option)}
          >
            {shown(option)}
          </li>
        ))}
      </ul>
      <p class="muted" role="status">
        {found.length === 0 ? "No name has this." : found.length > MOST_SHOWN ? `${counted(found.length - MOST_SHOWN, "more")}: go on typing.` : ""}
      </p>
    </div>
  );
}

/** Names with all the words of a text in them, in any order. */
export function matching(options: string[], text: string, shown: (value: string) => string): string[] {
  const words = text.toLowerCase().split(/\s+/);
  return options.filter((option) => {
    const names = `${option} ${shown(option)}`.toLowerCase();
    return words.every((word) => names.includes(word));
  });
}
