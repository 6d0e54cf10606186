#include "server/service/http_listener.h"

#include <httplib.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/service/address.h"

namespace sparsegdn::service {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

// A connection is served one request and lives this long at most, however its client drips: a slow
// one holds a thread for no longer. There are enough threads that a dozen of them do not delay a
// probe.
constexpr size_t kThreads = 16;
constexpr milliseconds kConnectionTime{2000};
// How soon a wait sees that the listener stops.
constexpr milliseconds kSlice{50};

// A connection whose waits all end by one deadline, or when the listener stops.
class TimedStream final : public httplib::Stream {
 public:
  TimedStream(int fd, const std::atomic<bool>& stopping)
      : fd_(fd), stopping_(stopping), end_(steady_clock::now() + kConnectionTime) {}

  bool is_readable() const override { return Wait(POLLIN); }
  bool is_writable() const override { return Wait(POLLOUT); }
  ssize_t read(char* data, size_t size) override {
    // The library reads single bytes up to the end of the headers.
    if (begin_ == size_) {
      ssize_t got = -1;
      do {
        if (!Wait(POLLIN)) return -1;
        got = recv(fd_, buffer_, sizeof(buffer_), MSG_DONTWAIT);
      } while (got < 0 && (errno == EAGAIN || errno == EINTR));
      if (got <= 0) return got;
      begin_ = 0;
      size_ = static_cast<size_t>(got);
    }
    const size_t taken = std::min(size, size_ - begin_);
    std::copy_n(buffer_ + begin_, taken, data);
    begin_ += taken;
    return static_cast<ssize_t>(taken);
  }
  ssize_t write(const char* data, size_t size) override {
    ssize_t put = -1;
    do {
      if (!Wait(POLLOUT)) return -1;
      put = send(fd_, data, size, MSG_DONTWAIT | MSG_NOSIGNAL);
    } while (put < 0 && (errno == EAGAIN || errno == EINTR));
    return put;
  }
  // Nothing here asks who the client is.
  void get_remote_ip_and_port(std::string&, int&) const override {}
  void get_local_ip_and_port(std::string&, int&) const override {}
  socket_t socket() const override { return fd_; }

 private:
  bool Wait(short what) const {
    if (what == POLLIN && begin_ < size_) return true;
    while (!stopping_) {
      const auto left = std::chrono::duration_cast<milliseconds>(end_ - steady_clock::now());
      if (left <= milliseconds(0)) return false;
      pollfd one{fd_, what, 0};
      const int ready = poll(&one, 1, static_cast<int>(std::min(left, kSlice).count()));
      if (ready > 0) return true;
      if (ready < 0 && errno != EINTR) return false;
    }
    return false;
  }

  const int fd_;
  const std::atomic<bool>& stopping_;
  const steady_clock::time_point end_;
  char buffer_[1024];
  size_t begin_ = 0, size_ = 0;
};

// The library's own timeouts are per read: a byte a second would hold a thread, and stop(), for
// ever.
class TimedServer final : public httplib::Server {
 public:
  void StopConnections() { stopping_ = true; }

 private:
  bool process_and_close_socket(socket_t fd) override {
    bool done = false;
    if (!stopping_) {
      TimedStream stream(fd, stopping_);
      bool closed = false;
      done = process_request(stream, /*close_connection=*/true, closed, nullptr);
    }
    shutdown(fd, SHUT_RDWR);
    close(fd);
    return done;
  }

  std::atomic<bool> stopping_{false};
};

class Listener final : public HttpListener {
 public:
  explicit Listener(HttpHandlers handlers) : handlers_(std::move(handlers)) { Configure(); }
  ~Listener() override {
    server_.StopConnections();
    server_.stop();
    if (thread_.joinable()) thread_.join();
  }
  int port() const override { return port_; }

  absl::Status Bind(const HostPort& address) {
    const std::string host = address.host.empty() ? "::" : address.host;
    if (address.port == 0) {
      port_ = server_.bind_to_any_port(host);
    } else {
      port_ = server_.bind_to_port(host, address.port) ? address.port : -1;
    }
    if (port_ > 0) {
      thread_ = std::thread([this] { server_.listen_after_bind(); });
      // stop() is a no-op until the loop runs: the destructor would then wait for ever.
      while (!server_.is_running()) std::this_thread::sleep_for(milliseconds(1));
      return absl::OkStatus();
    }
    absl::Status why = ProbeBind(address, "--metrics-listen");
    return why.ok() ? absl::UnavailableError(
                          absl::StrCat("--metrics-listen = ", ToText(address), ": cannot listen"))
                    : why;
  }

 private:
  void Configure() {
    server_.new_task_queue = [] { return new httplib::ThreadPool(kThreads); };
    // The library's default sets SO_REUSEPORT, under which a second server binds the same port
    // without an error.
    server_.set_socket_options([](int fd) {
      const int on = 1;
      setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
    });
    server_.set_payload_max_length(4096);
    server_.set_tcp_nodelay(true);
    server_.Get("/metrics", [this](const httplib::Request&, httplib::Response& response) {
      response.set_content(handlers_.metrics(), "text/plain; version=0.0.4; charset=utf-8");
    });
    server_.Get("/livez", [this](const httplib::Request&, httplib::Response& response) {
      const bool live = handlers_.live();
      response.status = live ? 200 : 503;
      response.set_content(live ? "ok\n" : "device fault\n", "text/plain");
    });
    server_.Get("/readyz", [this](const httplib::Request&, httplib::Response& response) {
      const std::string why = handlers_.not_ready();
      response.status = why.empty() ? 200 : 503;
      response.set_content(why.empty() ? "ready\n" : why + "\n", "text/plain");
    });
  }

  HttpHandlers handlers_;
  TimedServer server_;
  std::thread thread_;
  int port_ = -1;
};

}  // namespace

absl::StatusOr<std::unique_ptr<HttpListener>> HttpListener::Start(const std::string& address,
                                                                  HttpHandlers handlers) {
  absl::StatusOr<HostPort> parsed = ParseHostPort(address, "--metrics-listen");
  if (!parsed.ok()) return parsed.status();
  auto listener = std::make_unique<Listener>(std::move(handlers));
  absl::Status status = listener->Bind(*parsed);
  if (!status.ok()) return status;
  return listener;
}

}  // namespace sparsegdn::service
