// What a fuzz target is, and what its code may use. A target is one function of libFuzzer's shape
// in a file of its own; the deterministic driver (driver.cc) and libFuzzer both call it.
#ifndef SPARSEGDN_TESTS_FUZZ_FUZZ_TARGET_H_
#define SPARSEGDN_TESTS_FUZZ_FUZZ_TARGET_H_

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "tests/fuzz/mutate.h"

namespace sparsegdn::fuzz {

// Nesting in seeds at which a recursive walk, copy or comparison runs out of 8 MiB of stack.
inline constexpr size_t kDeep = 400'000;

struct Target {
  const char* name;
  Format format;
  int (*run)(const uint8_t*, size_t);  // 0; aborts on a broken promise
  std::vector<std::string> (*seeds)();
  size_t memory_base;      // bytes of heap that one run may add, beside
  size_t memory_per_byte;  // so many per byte of input
};

const std::vector<Target>& Targets();

int FuzzSafetensorsHeader(const uint8_t* data, size_t size);
int FuzzModelConfig(const uint8_t* data, size_t size);
int FuzzCheckpointFolder(const uint8_t* data, size_t size);
int FuzzServerConfig(const uint8_t* data, size_t size);
int FuzzPrefillRequest(const uint8_t* data, size_t size);
int FuzzSnapshotImport(const uint8_t* data, size_t size);
int FuzzSnapshotFile(const uint8_t* data, size_t size);
int FuzzResponseStream(const uint8_t* data, size_t size);
int FuzzBudgetProfile(const uint8_t* data, size_t size);
int FuzzBearerTokens(const uint8_t* data, size_t size);
int FuzzPrefixValue(const uint8_t* data, size_t size);
int FuzzTokens(const uint8_t* data, size_t size);

// Deterministic; at least one is accepted and at least one is refused.
std::vector<std::string> SafetensorsHeaderSeeds();
std::vector<std::string> ModelConfigSeeds();
std::vector<std::string> CheckpointFolderSeeds();
std::vector<std::string> ServerConfigSeeds();
std::vector<std::string> PrefillRequestSeeds();
std::vector<std::string> SnapshotImportSeeds();
std::vector<std::string> SnapshotFileSeeds();
std::vector<std::string> ResponseStreamSeeds();
std::vector<std::string> BudgetProfileSeeds();
std::vector<std::string> BearerTokensSeeds();
std::vector<std::string> PrefixValueSeeds();
std::vector<std::string> TokensSeeds();

// Ends the process with `what` unless `ok`: a promise of the code under test is broken.
void Require(bool ok, const std::string& what);

// A refusal must have one of `codes` and a message that is neither empty nor longer than
// `message_bytes_max`.
void RequireRefusal(const absl::Status& status, std::initializer_list<absl::StatusCode> codes,
                    size_t message_bytes_max);

// How far this input came, told once per run or more: the driver keeps inputs that end in a place
// no input ended in before (the message without its numbers and quotations names the place).
void NoteOutcome(const absl::Status& status);

struct Outcome {
  uint64_t place = 0;  // hash over everything noted
  bool accepted = false;
};
Outcome TakeOutcome();

}  // namespace sparsegdn::fuzz

#endif  // SPARSEGDN_TESTS_FUZZ_FUZZ_TARGET_H_
