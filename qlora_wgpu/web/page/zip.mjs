/** A ZIP archive of some files, as they are: weights would hardly become smaller. */

import { crc32 } from './crc32.mjs';

const LOCAL = 0x04034b50;
const CENTRAL = 0x02014b50;
const END = 0x06054b50;
const VERSION = 20; // of what is needed to read it: folders
const UTF8 = 0x0800; // names are

/**
 * @param {Record<string, Uint8Array|string>} files Contents by name; a slash makes a folder.
 * @param {Date} date When they were made.
 * @returns {Uint8Array}
 */
export function zipped(files, date) {
  const encoder = new TextEncoder();
  const [local, central] = [[], []];
  let at = 0;
  for (const [name, content] of Object.entries(files)) {
    const bytes = typeof content === 'string' ? encoder.encode(content) : content;
    const path = encoder.encode(name);
    // Needed version, flags, method (stored), time, day, checksum, size twice, length of the name, no more.
    const about = [[2, VERSION], [2, UTF8], [2, 0], ...dosTime(date), [4, crc32(bytes)], [4, bytes.length], [4, bytes.length], [2, path.length], [2, 0]];
    const head = record([4, LOCAL], ...about);
    local.push(head, path, bytes);
    // No comment, first disk, no attributes, where it begins.
    central.push(record([4, CENTRAL], [2, VERSION], ...about, [2, 0], [2, 0], [2, 0], [4, 0], [4, at]), path);
    at += head.length + path.length + bytes.length;
  }
  const count = Object.keys(files).length;
  const size = central.reduce((n, each) => n + each.length, 0);
  return joined([...local, ...central, record([4, END], [2, 0], [2, 0], [2, count], [2, count], [4, size], [4, at], [2, 0])]);
}

/** Time and day in MS-DOS's form: two seconds are its least, 1980 its first year. */
function dosTime(date) {
  const time = (date.getHours() << 11) | (date.getMinutes() << 5) | (date.getSeconds() >> 1);
  return [[2, time], [2, (Math.max(date.getFullYear() - 1980, 0) << 9) | ((date.getMonth() + 1) << 5) | date.getDate()]];
}

/** Numbers of two or four bytes, the low one first. */
function record(...fields) {
  const bytes = fields.flatMap(([size, value]) => Array.from({ length: size }, (_, i) => (value >>> (8 * i)) & 255));
  return Uint8Array.from(bytes);
}

function joined(parts) {
  const whole = new Uint8Array(parts.reduce((n, part) => n + part.length, 0));
  let at = 0;
  for (const part of parts) {
    whole.set(part, at);
    at += part.length;
  }
  return whole;
}
