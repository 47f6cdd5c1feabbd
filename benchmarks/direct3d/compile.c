/* Compiles HLSL as WebGPU implementations let it be compiled on Windows: by FXC or by DXC.

usage: compile.exe LIST SECONDS
LIST has a line for each shader: COMPILER TARGET SOURCE RESULT, COMPILER fxc or dxc; RESULT gets the
compiler's words. For each a line is printed: seconds of the processor, bytes of code (0 where it
failed), RESULT. One that takes more than SECONDS is told as -1 bytes, and ends the process. */

#define COBJMACROS
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <windows.h>
#include <d3dcompiler.h>

typedef struct {
  const void *text;
  SIZE_T size;
  UINT encoding;
} Source;

typedef struct Object Object;
typedef HRESULT (WINAPI *Method)(Object *, ...);
struct Object {
  Method *methods;
};

typedef HRESULT (WINAPI *FxcCompile)(const void *, SIZE_T, const char *, const void *, void *,
                                     const char *, const char *, UINT, UINT, ID3DBlob **,
                                     ID3DBlob **);
typedef HRESULT (WINAPI *DxcCreate)(const CLSID *, const IID *, void **);

static const GUID compiler_class = {
    0x73e22d93, 0xe6ce, 0x47f3, {0xb5, 0xbf, 0xf0, 0x66, 0x4f, 0x39, 0xc1, 0xb0}};
static const GUID compiler_type = {
    0x228b4687, 0x5a6a, 0x4730, {0x90, 0x0c, 0x97, 0x02, 0xb2, 0x20, 0x3f, 0x54}};
static const GUID result_type = {
    0x58346cda, 0xdde7, 0x4497, {0x94, 0x61, 0x6f, 0x87, 0xaf, 0x5e, 0x06, 0x59}};

static FxcCompile fxc;
static double begun, most;
static char now[512];
static Object *dxc;

static char *read_all(const char *path, SIZE_T *size) {
  FILE *file = fopen(path, "rb");
  if (!file) {
    fprintf(stderr, "%s cannot be read\n", path);
    exit(2);
  }
  fseek(file, 0, SEEK_END);
  *size = ftell(file);
  rewind(file);
  char *text = malloc(*size + 1);
  *size = fread(text, 1, *size, file);
  text[*size] = 0;
  fclose(file);
  return text;
}

static void write_words(const char *path, ID3DBlob *words) {
  FILE *file = fopen(path, "wb");
  if (words) fwrite(ID3D10Blob_GetBufferPointer(words), 1, ID3D10Blob_GetBufferSize(words), file);
  fclose(file);
}

static SIZE_T by_fxc(const char *text, SIZE_T size, const char *target, const char *result) {
  ID3DBlob *code = NULL, *words = NULL;
  HRESULT failed = fxc(text, size, "shader", NULL, NULL, "main", target,
                       D3DCOMPILE_ENABLE_STRICTNESS, 0, &code, &words);
  write_words(result, words);
  return FAILED(failed) ? 0 : ID3D10Blob_GetBufferSize(code);
}

/* IDxcCompiler3 has Compile after IUnknown's three; IDxcResult GetStatus, GetResult and
   GetErrorBuffer. */
static SIZE_T by_dxc(const char *text, SIZE_T size, const char *target, const char *result) {
  WCHAR wide[16];
  mbstowcs(wide, target, 16);
  const WCHAR *options[] = {L"-E", L"main", L"-T", wide, L"-HV", L"2018", L"-Ges",
                            L"-enable-16bit-types"};
  Source source = {text, size, 65001};
  Object *made = NULL;
  ID3DBlob *code = NULL, *words = NULL;
  int halves = strcmp(target, "cs_6_2") >= 0;
  HRESULT status = dxc->methods[3](dxc, &source, options, 7 + halves, NULL, &result_type, &made);
  if (SUCCEEDED(status)) made->methods[3](made, &status);
  if (made) made->methods[5](made, &words);
  write_words(result, words);
  if (FAILED(status)) return 0;
  made->methods[4](made, &code);
  return code ? ID3D10Blob_GetBufferSize(code) : 0;
}

static double processor_seconds(void) {
  FILETIME made, ended, kernel, user;
  GetProcessTimes(GetCurrentProcess(), &made, &ended, &kernel, &user);
  ULONGLONG ticks = ((ULONGLONG)user.dwHighDateTime << 32) + user.dwLowDateTime;
  return 1e-7 * ticks;
}

/* A compiler cannot be interrupted: what waits for one behind is begun anew by who called. */
static DWORD WINAPI watch(void *nothing) {
  for (;;) {
    Sleep(200);
    double seconds = processor_seconds() - begun;
    if (seconds > most) {
      printf("%.3f -1 %s\n", seconds, now);
      fflush(stdout);
      TerminateProcess(GetCurrentProcess(), 3);
    }
  }
  return 0;
}

int main(int count, char **arguments) {
  HMODULE fxc_library = LoadLibraryA("d3dcompiler_47.dll");
  HMODULE dxc_library = LoadLibraryA("dxcompiler.dll");
  if (count != 3 || !fxc_library || !dxc_library) {
    fprintf(stderr, "compile.exe LIST SECONDS, beside d3dcompiler_47.dll and dxcompiler.dll\n");
    return 2;
  }
  fxc = (FxcCompile)(void *)GetProcAddress(fxc_library, "D3DCompile");
  DxcCreate create = (DxcCreate)(void *)GetProcAddress(dxc_library, "DxcCreateInstance");
  if (FAILED(create(&compiler_class, &compiler_type, (void **)&dxc))) return 2;
  most = atof(arguments[2]);
  begun = processor_seconds();
  CreateThread(NULL, 0, watch, NULL, 0, NULL);
  FILE *list = fopen(arguments[1], "r");
  char compiler[8], target[16], path[512], result[512];
  while (list && fscanf(list, "%7s %15s %511s %511s", compiler, target, path, result) == 4) {
    SIZE_T size;
    char *text = read_all(path, &size);
    strcpy(now, result);
    begun = processor_seconds();
    SIZE_T made = !strcmp(compiler, "fxc") ? by_fxc(text, size, target, result)
                                           : by_dxc(text, size, target, result);
    free(text);
    printf("%.3f %lu %s\n", processor_seconds() - begun, (unsigned long)made, result);
    fflush(stdout);
  }
  return 0;
}
