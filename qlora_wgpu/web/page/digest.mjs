/** SHA-256 of some bytes, in hexadecimal. */
export async function sha256(content) {
  const digest = new Uint8Array(await crypto.subtle.digest('SHA-256', content));
  return Array.from(digest, (byte) => byte.toString(16).padStart(2, '0')).join('');
}
