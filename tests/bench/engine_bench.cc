// The engine's own best tokens/s, without a service: the yardstick of load_figures.py.
//
// Method: one engine as the server makes it from the same flags; OUTSTANDING prompts of TOKENS
// tokens at any time, each replaced the moment its last event is read. Counted are the tokens of
// the steps that end within SECONDS, over the time from the first to the last of those ends; the
// steps of a tenth of that time before are warm-up.
//
// usage: sparsegdn-engine-bench TOKENS OUTSTANDING SECONDS [flags of sparsegdn-server]; prints
// JSON.
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "server/engine/engine.h"
#include "server/model/load_model.h"
#include "server/service/config.h"
#include "server/service/startup.h"

namespace sparsegdn {
namespace {

using Clock = std::chrono::steady_clock;

struct Load {
  int64_t tokens = 0, outstanding = 0, seconds = 0;
};

// Counts the steps that end while it is on.
class StepCounter final : public engine::EngineObserver {
 public:
  void OnStep(int64_t tokens, int64_t requests, const model::StepStats&) override {
    if (!on_) return;
    const Clock::time_point now = Clock::now();
    std::lock_guard lock(mutex_);
    if (first_) {  // the first end only starts the clock
      ++steps_;
      tokens_ += tokens;
      requests_ += requests;
    } else {
      first_ = now;
    }
    last_ = now;
  }
  void set_on(bool on) { on_ = on; }
  std::string Json() const {
    std::lock_guard lock(mutex_);
    const double seconds = first_ ? std::chrono::duration<double>(last_ - *first_).count() : 0;
    const auto per = [](double value, double of) { return of > 0 ? value / of : 0.0; };
    const double tokens = static_cast<double>(tokens_), steps = static_cast<double>(steps_);
    return absl::StrCat("{\"tokens_per_second\": ", per(tokens, seconds), ", \"steps\": ", steps_,
                        ", \"tokens_per_step\": ", per(tokens, steps),
                        ", \"requests_per_step\": ", per(static_cast<double>(requests_), steps),
                        "}");
  }

 private:
  std::atomic<bool> on_{false};
  mutable std::mutex mutex_;
  std::optional<Clock::time_point> first_;
  Clock::time_point last_;
  int64_t steps_ = 0, tokens_ = 0, requests_ = 0;
};

// Places whose call may have news.
class ReadyQueue {
 public:
  void Push(size_t place) {
    std::lock_guard lock(mutex_);
    places_.push_back(place);
    changed_.notify_one();
  }
  std::optional<size_t> Pop(Clock::time_point end) {
    std::unique_lock lock(mutex_);
    if (!changed_.wait_until(lock, end, [this] { return !places_.empty(); })) return std::nullopt;
    const size_t place = places_.front();
    places_.pop_front();
    return place;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<size_t> places_;
};

engine::PrefillRequest Prompt(const Load& load, int64_t number, int32_t vocab_size) {
  engine::PrefillRequest request;
  request.tokens.resize(static_cast<size_t>(load.tokens));
  for (size_t i = 0; i < request.tokens.size(); ++i) {
    request.tokens[i] =
        static_cast<int32_t>((static_cast<int64_t>(i) * 31 + number * 7919) % vocab_size);
  }
  request.prefix_reuse = false;
  return request;
}

absl::Status Drive(engine::Engine& engine, const Load& load, StepCounter& counter) {
  ReadyQueue ready;
  std::vector<std::shared_ptr<engine::PrefillCall>> calls(static_cast<size_t>(load.outstanding));
  int64_t number = 0;
  const auto submit = [&](size_t place) {
    auto call = engine.Submit(Prompt(load, number++, engine.model_info().vocab_size));
    if (!call.ok()) return call.status();
    calls[place] = *std::move(call);
    calls[place]->SetReadyCallback([&ready, place] { ready.Push(place); });
    return absl::OkStatus();
  };
  const Clock::time_point start = Clock::now();
  const Clock::time_point warm = start + std::chrono::milliseconds(100 * load.seconds);
  const Clock::time_point end = warm + std::chrono::seconds(load.seconds);
  absl::Status status;
  for (size_t place = 0; place < calls.size() && status.ok(); ++place) status = submit(place);
  while (status.ok() && Clock::now() < end) {
    counter.set_on(Clock::now() >= warm);
    const std::optional<size_t> place = ready.Pop(end);
    if (!place) break;
    engine::PrefillCall& call = *calls[*place];
    while (call.TryPop()) {
    }
    if (const std::optional<absl::Status> ended = call.status()) {
      status = *ended;
      call.SetReadyCallback(nullptr);
      if (status.ok()) status = submit(*place);
    }
  }
  counter.set_on(false);
  for (const auto& call : calls) {
    if (call == nullptr) continue;
    call->SetReadyCallback(nullptr);
    call->Cancel(false);
  }
  return status;
}

absl::Status Run(const std::vector<std::string>& args) {
  Load load;
  if (args.size() < 3 || !absl::SimpleAtoi(args[0], &load.tokens) ||
      !absl::SimpleAtoi(args[1], &load.outstanding) || !absl::SimpleAtoi(args[2], &load.seconds) ||
      load.tokens < 1 || load.outstanding < 1 || load.seconds < 1) {
    return absl::InvalidArgumentError("usage: TOKENS OUTSTANDING SECONDS [flags of the server]");
  }
  auto read = service::ParseConfig({args.begin() + 3, args.end()}, {});
  if (!read.ok()) return read.status();
  auto config = service::ToEngineConfig(read->config);
  if (!config.ok()) return config.status();
  config->prefix_cache_bytes = 0;
  auto options = service::ToLoadOptions(read->config);
  if (!options.ok()) return options.status();
  options->progress = nullptr;
  auto runner = model::LoadModel(*options);
  if (!runner.ok()) return runner.status();
  StepCounter counter;
  auto engine =
      engine::Engine::Create(*config, *std::move(runner), &counter, engine::Clock::Real());
  if (!engine.ok()) return engine.status();
  absl::Status status = Drive(**engine, load, counter);
  (*engine)->Drain(0);
  engine->reset();
  if (status.ok()) std::printf("%s\n", counter.Json().c_str());
  return status;
}

}  // namespace
}  // namespace sparsegdn

int main(int argc, char** argv) {
  const absl::Status status = sparsegdn::Run({argv + 1, argv + argc});
  if (status.ok()) return 0;
  std::fprintf(stderr, "sparsegdn-engine-bench: %s\n", std::string(status.message()).c_str());
  return 1;
}
