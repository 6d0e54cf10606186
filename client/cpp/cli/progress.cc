#include "cli/progress.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "cli/render.h"

namespace sparsegdn::cli {
namespace {

double Share(double done, double total) {
  return total > 0 ? std::clamp(done / total, 0.0, 1.0) : 0.0;
}

}  // namespace

std::string ProgressLine(const client::PrefillProgress& progress) {
  using Stage = client::PrefillProgress::Stage;
  if (progress.stage == Stage::kQueued) {
    return absl::StrCat("queued, ", progress.queue_position, " requests and ",
                        Grouped(progress.queued_tokens), " tokens ahead");
  }
  const double computed = Share(progress.tokens_done, progress.tokens_total);
  const double streamed = Share(progress.bytes_done, progress.bytes_total);
  // Layers stream while later chunks still run: the bar shows the mean of both.
  const double share = progress.bytes_total > 0 ? (computed + streamed) / 2 : computed / 2;
  const int filled = static_cast<int>(share * 24);
  std::string line = absl::StrFormat("[%s%s] %3.0f %%  %s of %s tokens", std::string(filled, '#'),
                                     std::string(24 - filled, '.'), share * 100,
                                     Grouped(progress.tokens_done), Grouped(progress.tokens_total));
  if (progress.bytes_total > 0) {
    absl::StrAppend(&line, ", ", Bytes(progress.bytes_done), " of ", Bytes(progress.bytes_total));
  }
  return line.substr(0, 79);
}

ProgressBar::ProgressBar(bool enabled)
    : visible_(enabled && isatty(STDERR_FILENO) == 1), next_(std::chrono::steady_clock::now()) {}

ProgressBar::~ProgressBar() {
  if (drawn_) std::fprintf(stderr, "\r\033[K");
}

void ProgressBar::Update(const client::PrefillProgress& progress) {
  const auto now = std::chrono::steady_clock::now();
  if (!visible_ || now < next_) return;
  next_ = now + std::chrono::milliseconds(100);
  drawn_ = true;
  std::fprintf(stderr, "\r\033[K%s", ProgressLine(progress).c_str());
}

}  // namespace sparsegdn::cli
