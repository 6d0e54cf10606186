// The deterministic driver: mutates a target's seeds a fixed number of times and ends with 1 at the
// first input that crashes, throws, breaks a promise, hangs or costs too much memory. The input is
// written to fuzz-TARGET.bin in the working folder; --replay runs it again.
//
// Inputs that end where none ended before join the corpus, so that later mutations start there.
#include <google/protobuf/stubs/logging.h>
#include <signal.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <fstream>
#include <iterator>
#include <string>
#include <unordered_set>
#include <vector>

#include "tests/fuzz/fuzz_target.h"
#include "tests/fuzz/memory_meter.h"

extern "C" void __sanitizer_set_death_callback(void (*callback)()) __attribute__((weak));

namespace sparsegdn::fuzz {
namespace {

constexpr unsigned kSecondsPerInput = 60;  // a sanitizer on a loaded machine; plain runs take ms
constexpr size_t kMaxCorpus = 512;
constexpr size_t kLargeBytes = 1 << 16;

const std::string* g_input = nullptr;
std::string g_path;
long g_iteration = -1;

// Called from a signal handler: system calls only, besides printing the last words.
void SaveInput() {
  if (g_input == nullptr) return;
  std::FILE* file = std::fopen(g_path.c_str(), "wb");
  if (file != nullptr) {
    std::fwrite(g_input->data(), 1, g_input->size(), file);
    std::fclose(file);
  }
  std::fprintf(stderr, "fuzz: iteration %ld, %zu bytes of input in %s\n", g_iteration,
               g_input->size(), g_path.c_str());
  g_input = nullptr;
}

void OnSignal(int signal_number) {
  std::fprintf(stderr, "fuzz: signal %d (%s)\n", signal_number, strsignal(signal_number));
  SaveInput();
  _exit(1);
}

// On a stack of their own, because one of the signals means that the stack is used up.
void CatchSignals() {
  static char stack[1 << 16];
  const stack_t alternative = {.ss_sp = stack, .ss_flags = 0, .ss_size = sizeof(stack)};
  sigaltstack(&alternative, nullptr);
  struct sigaction action = {};
  action.sa_handler = OnSignal;
  action.sa_flags = SA_ONSTACK;
  sigaction(SIGALRM, &action, nullptr);
  sigaction(SIGABRT, &action, nullptr);
  if (__sanitizer_set_death_callback != nullptr) {  // its report says more than ours
    __sanitizer_set_death_callback(SaveInput);
    return;
  }
  for (const int number : {SIGSEGV, SIGBUS, SIGFPE, SIGILL}) sigaction(number, &action, nullptr);
}

[[noreturn]] void Fail(const std::string& why) {
  std::fprintf(stderr, "fuzz: %s\n", why.c_str());
  SaveInput();
  std::fflush(stderr);
  _exit(1);
}

Outcome RunOne(const Target& target, const std::string& input, bool metered) {
  g_input = &input;
  alarm(kSecondsPerInput);
  ResetPeak();
  TakeOutcome();
  try {
    if (target.run(reinterpret_cast<const uint8_t*>(input.data()), input.size()) != 0) {
      Fail("the target did not return 0");
    }
  } catch (const std::exception& error) {
    Fail(std::string("an exception left the code under test: ") + error.what());
  }
  const size_t peak = PeakBytes();
  const size_t most = target.memory_base + target.memory_per_byte * input.size();
  if (metered && peak > most) {
    Fail("took " + std::to_string(peak) + " bytes of heap, at most " + std::to_string(most));
  }
  alarm(0);
  g_input = nullptr;
  return TakeOutcome();
}

// Half of the mutations start at a seed, few at a large input.
size_t Pick(const std::vector<std::string>& corpus, size_t seeds, Rng& rng) {
  while (true) {
    const size_t at = rng.Below(rng.OneIn(2) ? seeds : corpus.size());
    if (corpus[at].size() < kLargeBytes || rng.OneIn(50)) return at;
  }
}

int Fuzz(const Target& target, long iterations, uint64_t seed) {
  std::vector<std::string> corpus = target.seeds();
  if (corpus.empty()) Fail("no seeds");
  const size_t seeds = corpus.size();
  std::unordered_set<uint64_t> places;
  long accepted = 0, refused = 0;
  RunOne(target, corpus[0], /*metered=*/false);  // what is set up once is nobody's cost
  for (const std::string& input : corpus) {
    const Outcome outcome = RunOne(target, input, true);
    places.insert(outcome.place);
    ++(outcome.accepted ? accepted : refused);
  }
  if (accepted == 0 || refused == 0) Fail("the seeds must have some accepted, some refused");
  Rng rng(seed);
  for (g_iteration = 0; g_iteration < iterations; ++g_iteration) {
    const std::string& from = corpus[Pick(corpus, seeds, rng)];
    std::string input = Mutate(target.format, from, corpus[Pick(corpus, seeds, rng)], rng);
    const Outcome outcome = RunOne(target, input, true);
    ++(outcome.accepted ? accepted : refused);
    const bool is_new = places.insert(outcome.place).second;
    if (is_new && corpus.size() < kMaxCorpus) corpus.push_back(std::move(input));
  }
  std::printf("%s: %zu seeds, %ld iterations, seed %llu: %ld accepted, %ld refused, %zu places\n",
              target.name, seeds, iterations, static_cast<unsigned long long>(seed), accepted,
              refused, places.size());
  return 0;
}

int Replay(const Target& target, const char* path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) {
    std::fprintf(stderr, "fuzz: cannot read %s\n", path);
    return 2;
  }
  const std::string input(std::istreambuf_iterator<char>(file), {});
  g_path += ".replayed";
  RunOne(target, target.seeds()[0], /*metered=*/false);
  const Outcome outcome = RunOne(target, input, true);
  std::printf("%s: %s\n", target.name, outcome.accepted ? "accepted" : "refused");
  return 0;
}

int WriteSeeds(const Target& target, const std::string& folder) {
  const std::vector<std::string> seeds = target.seeds();
  for (size_t i = 0; i < seeds.size(); ++i) {
    std::ofstream file(folder + "/seed-" + std::to_string(i), std::ios::binary);
    file.write(seeds[i].data(), static_cast<std::streamsize>(seeds[i].size()));
    if (!file) {
      std::fprintf(stderr, "fuzz: cannot write to %s\n", folder.c_str());
      return 2;
    }
  }
  return 0;
}

int Main(int argc, char** argv) {
  const std::string verb = argc > 2 ? argv[2] : "";
  for (const Target& target : Targets()) {
    if (argc != 4 || std::strcmp(argv[1], target.name) != 0) continue;
    g_path = std::string("fuzz-") + target.name + ".bin";
    CatchSignals();
    google::protobuf::SetLogHandler(nullptr);  // it prints each string that is not UTF-8
    if (verb == "--replay") return Replay(target, argv[3]);
    if (verb == "--write-seeds") return WriteSeeds(target, argv[3]);
    return Fuzz(target, std::strtol(argv[2], nullptr, 10), std::strtoull(argv[3], nullptr, 10));
  }
  std::fprintf(stderr,
               "usage: sparsegdn_fuzz TARGET ITERATIONS SEED\n"
               "       sparsegdn_fuzz TARGET --replay FILE\n"
               "       sparsegdn_fuzz TARGET --write-seeds FOLDER\ntargets:");
  for (const Target& target : Targets()) std::fprintf(stderr, " %s", target.name);
  std::fprintf(stderr, "\n");
  return 2;
}

}  // namespace
}  // namespace sparsegdn::fuzz

int main(int argc, char** argv) { return sparsegdn::fuzz::Main(argc, argv); }
