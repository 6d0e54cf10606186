#include "server/service/http_listener.h"

#include <httplib.h>
#include <sys/socket.h>

#include <chrono>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/service/address.h"

namespace sparsegdn::service {
namespace {

// A client that sends nothing holds one thread for kTimeoutSeconds; there are enough of them that
// two or three such clients do not delay a scrape.
constexpr size_t kThreads = 8;
constexpr int kTimeoutSeconds = 2;

class Listener final : public HttpListener {
 public:
  explicit Listener(HttpHandlers handlers) : handlers_(std::move(handlers)) { Configure(); }
  ~Listener() override {
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
      while (!server_.is_running()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
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
    server_.set_read_timeout(kTimeoutSeconds);
    server_.set_write_timeout(kTimeoutSeconds);
    server_.set_keep_alive_timeout(kTimeoutSeconds);
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
  httplib::Server server_;
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
