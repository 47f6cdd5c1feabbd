/** Rows of a file that was dropped: JSON Lines, JSON, CSV; a text file is one document. */

import { hintOfList } from './conversations.mjs';
import { Told } from './device.mjs';
import { isObject, JsonReader, MOST_KEYS, parseJson } from './json.mjs';
import { isBlank } from './strip.mjs';
import { counted, number } from './words.mjs';

const KINDS = ['jsonl', 'ndjson', 'json', 'csv', 'tsv', 'txt', 'md'];
const PACKED = ['gz', 'zip', 'bz2', 'xz', 'zst', '7z', 'rar', 'tar', 'tgz'];
/** How files begin that are no text, whatever their names say; as data/sources.py has it. */
const CONTENTS = [['\x1f\x8b', 'gzip'], ['PK\x03\x04', 'zip'], ['\x28\xb5\x2f\xfd', 'zstd'], ['\xfd7zXZ\x00', 'xz'], ['BZh', 'bzip2'], ['PAR1', 'parquet']];
const MOST_MIB = 256; // of a file: browsers end a string at 512 MiB, and examples take more than their text
const MOST_ROW_MIB = 16; // as limits.py has it
const MOST_OF_A_ROW = MOST_ROW_MIB * 2 ** 20;

const kindOf = (name) => name.split('.').pop().toLowerCase();

/**
 * The text of a file that was dropped.
 *
 * @param {string} name
 * @param {Blob} file
 * @throws {Told} If it is no text, or too long.
 */
export async function textOf(name, file) {
  checkKind(name);
  const mib = Math.ceil(file.size / 2 ** 20);
  if (mib > MOST_MIB) throw new Told(`${name} has ${mib.toLocaleString('en')} MiB, but a page reads at most ${MOST_MIB}: use a part of it.`);
  let content;
  try {
    content = await file.arrayBuffer();
  } catch (error) {
    throw new Told(`${name} cannot be read (${error.message}): choose it again.`);
  }
  const kind = CONTENTS.find(([sign]) => begins(content, sign))?.[1];
  if (kind === 'parquet') throw new Told(ofParquet(name));
  if (kind) throw new Told(`${name} is compressed: unpack it first.`);
  try {
    return new TextDecoder('utf-8', { fatal: true, ignoreBOM: true }).decode(content);
  } catch {
    throw new Told(`${name} is not UTF-8 text: save it as UTF-8.`);
  }
}

/** Whether a file begins with some characters, which are bytes. */
function begins(content, sign) {
  const bytes = new Uint8Array(content, 0, Math.min(sign.length, content.byteLength));
  return bytes.length === sign.length && bytes.every((byte, i) => byte === sign.charCodeAt(i));
}

const ofParquet = (name) => `${name}: Parquet is not supported in a browser: save it as .jsonl or .csv.`;

function checkKind(name) {
  const kind = kindOf(name);
  if (PACKED.includes(kind)) throw new Told(`${name} is compressed: unpack it first.`);
  if (kind === 'parquet') throw new Told(ofParquet(name));
  if (!KINDS.includes(kind)) throw new Told(`${name} is not supported (supported: .jsonl, .json, .csv, .txt).`);
}

/**
 * @param {string} name The file's name, whose ending tells its kind.
 * @param {string} text Its content.
 * @returns {{where: string, row: object, document?: boolean}[]}
 * @throws {Told} If it is none of them, or damaged.
 */
export function rowsOf(name, text) {
  checkKind(name);
  const kind = kindOf(name);
  const content = text.replace(/^\ufeff/, '');
  if (kind === 'jsonl' || kind === 'ndjson') return jsonLines(name, content);
  if (kind === 'json') return jsonRows(name, content);
  if (kind === 'csv' || kind === 'tsv') return csvRows(name, content);
  return [{ where: name, row: { text: content.replace(/\r\n?/g, '\n') }, document: true }];
}

const isList = (content) => /^[ \t\n\r]*\[/.test(content);

/** Rows of a .json file: one list of them, or one after another; there may be one alone. */
function jsonRows(name, content) {
  const values = [];
  within(name, () => {
    const reader = new JsonReader(content);
    const take = () => {
      reader.peek();
      const begin = reader.at;
      values.push(reader.value());
      if (isLonger(content.slice(begin, reader.at))) throw new Told(`row ${values.length} is longer than ${MOST_ROW_MIB} MiB: split it`);
    };
    if (isList(content)) {
      reader.items(']', take);
      if (reader.peek()) throw reader.wrong('Extra data');
    } else {
      while (reader.peek()) take();
    }
  });
  if (!isList(content) && (!isObject(values[0]) || (values.length < 2 && wrapsRows(values[0])))) {
    throw new Told(`${name} must contain a list of rows, or one object per line${hintOfList(values[0])}.`);
  }
  return checked(values.map((row, index) => ({ where: `${name} row ${index + 1}`, row })), name);
}

/** Whether an object holds one list and nothing more, which is of no messages. */
function wrapsRows(object) {
  const [list, ...others] = Object.values(object);
  if (others.length || !Array.isArray(list)) return false;
  return !(isObject(list[0]) && ['role', 'from'].some((key) => Object.hasOwn(list[0], key)));
}

function jsonLines(name, content) {
  const rows = [];
  if (isList(content)) throw new Told(`${name} contains a list: rename it to .json.`);
  content.split('\n').forEach((line, index, lines) => {
    const where = `${name} line ${index + 1}`;
    if (bytesOf(line) + (index < lines.length - 1) > MOST_OF_A_ROW) {
      throw new Told(`${where} is longer than ${MOST_ROW_MIB} MiB: split it into several rows, or put a long document into a .txt file.`);
    }
    if (!isBlank(line)) rows.push({ where, row: within(where, () => parseJson(line)) });
  });
  return checked(rows, name);
}

/** Bytes of a text as UTF-8, where it may have too many; they matter nowhere else. */
const bytesOf = (text) => (3 * text.length < MOST_OF_A_ROW ? 0 : new TextEncoder().encode(text).length);

/** Whether a row has more characters than Python reads, which counts no half ones. */
function isLonger(text) {
  if (text.length <= MOST_OF_A_ROW) return false;
  let halves = 0;
  for (let i = 0; i < text.length; i++) halves += (text.charCodeAt(i) & 0xfc00) === 0xdc00;
  return text.length - halves > MOST_OF_A_ROW;
}

/** What is read at a place, which is named where something is wrong. */
function within(where, read) {
  try {
    return read();
  } catch (error) {
    throw error instanceof Told ? new Told(`${where}: ${error.message}.`) : error;
  }
}

function checked(rows, name) {
  if (!rows.length) throw new Told(`${name} has no rows.`);
  for (const { where, row } of rows) {
    if (!row || typeof row !== 'object' || Array.isArray(row)) throw new Told(`${where}: a row must be a JSON object, such as {"text": …}.`);
  }
  return rows;
}

/** Comma-separated values, by semicolons or tabs where the first line has no comma. */
function csvRows(name, content) {
  const first = content.split(/[\r\n]/, 1)[0];
  const delimiter = [',', ';', '\t'].find((each) => first.includes(each)) ?? ',';
  const records = csvRecords(name, content, delimiter);
  const names = records.shift()?.cells ?? [];
  if (names.length > MOST_KEYS) throw new Told(`${name}: it has ${number(names.length)} columns, more than ${number(MOST_KEYS)}.`);
  if (new Set(names).size < names.length || !names.every(Boolean)) {
    throw new Told(`${name}: the first line must name every column exactly once.`);
  }
  const rows = records.filter(({ cells }) => cells.length).map(({ cells, line }) => {
    const where = `${name} line ${line}`;
    if (cells.length !== names.length) {
      throw new Told(`${where}: expected ${counted(names.length, 'cell')} as in the first line, got ${number(cells.length)}.`);
    }
    return { where, row: Object.fromEntries(names.map((column, i) => [column, cells[i]])) };
  });
  return checked(rows, name);
}

/** The cells of each record, none of a blank line, and the line it ends in; as strict as Python's csv. */
function csvRecords(name, content, delimiter) {
  const records = [];
  let [cells, cell, line] = [[], '', 1];
  let [begin, first] = [0, 1]; // of the record: its place, and the number of its line
  let state = 'begin'; // of a cell; then 'plain', 'quoted' or 'closed'
  const endCell = () => {
    cells.push(cell);
    [cell, state] = ['', 'begin'];
  };
  const endRecord = (end) => {
    if (isLonger(content.slice(begin, end))) throw new Told(`${name}: the row that begins in line ${first} is longer than ${MOST_ROW_MIB} MiB: is a closing quote missing?`);
    if (cells.length || state !== 'begin') endCell();
    records.push({ cells, line });
    [cells, begin, first] = [[], end, line + 1];
  };
  for (let i = 0; i < content.length; i++) {
    const c = content[i];
    const ends = c === '\n' || c === '\r';
    if (c === '\r' && content[i + 1] === '\n' && state !== 'quoted') continue;
    if (state === 'quoted') {
      if (c === '"') state = 'closed';
      else cell += c;
    } else if (state === 'closed' && c === '"') {
      [cell, state] = [`${cell}"`, 'quoted'];
    } else if (ends) {
      endRecord(i + 1);
    } else if (c === delimiter) {
      endCell();
    } else if (state === 'closed') {
      throw new Told(`${name} line ${line}: not valid CSV ('${delimiter}' is expected after a closing quote).`);
    } else if (c === '"' && state === 'begin') {
      state = 'quoted';
    } else {
      [cell, state] = [cell + c, 'plain'];
    }
    if (c === '\n' || (c === '\r' && content[i + 1] !== '\n')) line++;
  }
  if (state === 'quoted') throw new Told(`${name}: a quote is not closed.`);
  if (cells.length || state !== 'begin') endRecord(content.length);
  return records;
}
